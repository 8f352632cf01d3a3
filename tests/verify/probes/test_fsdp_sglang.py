"""``flashpatch-verify fsdp`` where verl's rollouts are SGLang's: what it says, and when a bit passes unseen."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_lab import environment
from machine import limit
from sglang_lab import FRAMEWORK

pytest.importorskip("torch")

from flashpatch.verify.probes.fsdp import verl_sglang_probe as probe

ANSWER = [5.0, 6.0, -1.0, -2.0]
GOOD: dict[str, Any] = {
    "before": [[5.0, 7.0, -1.0, -1.5]],
    "transfers": [
        {"error": "", "answers": [ANSWER]},
        {"error": f"refused: {probe.VICTIM} has other values"},
        {"error": "", "answers": [ANSWER]},
        {"error": f"refused: {probe.VICTIM} has other values"},
    ],
}


def verdicts(seen: dict[str, Any], wanted: list[list[float]] = [[-1.0, -2.0]]) -> list[bool]:
    return [proof.ok for proof in probe.weigh(seen, "", wanted)]


def test_a_good_run_is_proven() -> None:
    assert verdicts(GOOD) == 4 * [True]


@pytest.mark.parametrize(
    ("number", "spoilt"),
    [
        (0, {"error": "lost", "answers": [ANSWER]}),
        (1, {"error": ""}),
        (1, {"error": "refused: model.norm.weight"}),
        (2, {"error": "", "answers": [[5.0, 6.0, -1.0, -2.01]]}),
        (2, {"error": "", "answers": GOOD["before"]}),
    ],
)
def test_what_is_wrong_is_not_proven(number: int, spoilt: dict[str, Any]) -> None:
    seen = copy.deepcopy(GOOD)
    seen["transfers"][number] = spoilt
    assert verdicts(seen) == [place != number for place in range(4)]


def test_a_job_that_fails_or_stops_short_is_one_failed_proof() -> None:
    assert verdicts({"failed": "RuntimeError: no"}) == [False]
    assert verdicts({**GOOD, "transfers": GOOD["transfers"][:3]}) == [False]


@pytest.mark.verl
@pytest.mark.sglang
@pytest.mark.full
def test_the_probe_proves_the_family(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "fsdp", "--json"],
        env=environment(tmp_path, TORCHDYNAMO_DISABLE="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(900),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert f"fsdp.{FRAMEWORK}.update_weights_from_tensor" in json.dumps(said)
