"""The family's probe where SGLang is the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest
from machine import limit

from flashpatch.verify.probes.eagle import sglang_probe

pytestmark = pytest.mark.sglang

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
BACK = {"eagle_drafter": 0, "eagle_sync": {"before": 3.9, "after": 1.1, "verdict": "taken back"}}


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


@pytest.mark.parametrize(
    ("notes", "again", "good"),
    [
        (BACK, 3.9, True),
        (BACK, 1.2, False),
        ({**BACK, "eagle_drafter": 1}, 3.9, False),
        ({"eagle_drafter": 1, "eagle_sync": {"before": 3.9}}, 3.9, False),
        (
            {"eagle_drafter": 0, "eagle_sync": {"before": 1.2, "after": 1.1, "verdict": "taken back"}},
            3.9,
            False,
        ),
        ({}, 3.9, False),
    ],
)
def test_how_a_drafter_that_went_back_is_weighed(notes: dict[str, Any], again: float, good: bool) -> None:
    assert sglang_probe.synced(notes, {"lengths": {"after": [again]}})[0] is good


@pytest.mark.parametrize(
    ("told", "good"),
    [
        ({"steps": 90.0, "batch_4/3_1_4/pulls": 60.0, "batch_4/disable/pulls": 30.0}, True),
        ({"steps": 90.0, "batch_4/3_1_4/pulls": 90.0, "batch_4/disable/pulls": 0.0}, False),
        ({"steps": 9.0, "batch_4/3_1_4/pulls": 5.0, "batch_4/disable/pulls": 4.0}, False),
        (None, False),
    ],
)
def test_how_the_bandits_decisions_are_weighed(told: Any, good: bool) -> None:
    assert sglang_probe.switched({"eagle_bandit": told})[0] is good
