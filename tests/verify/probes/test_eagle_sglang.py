"""The family's probe where SGLang is the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import eagle_engines as eagles
import pytest
from machine import limit

pytestmark = pytest.mark.sglang

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.full
def test_on_a_real_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "eagle", "--json"],
        env=eagles.lab.environment(tmp_path, TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    [family] = json.loads(done.stdout)["families"]
    assert all(one["ok"] for one in family["proofs"]) and len(family["proofs"]) >= 6
