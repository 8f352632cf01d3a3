"""The probe of family cpu where SGLang is verl's rollout engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_lab as lab
from machine import limit

pytestmark = [pytest.mark.verl, pytest.mark.sglang]

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.full
def test_on_two_real_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "cpu", "--json"],
        env=lab.environment(tmp_path, TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [family] = json.loads(done.stdout)["families"]
    assert "sglang 0." in family["proofs"][0]["evidence"]
