"""``flashpatch-verify fsdp``: what it says of real ranks, how it weighs what they saw, and when a bit passes unseen."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_lab import environment
from verify_command import verify

from flashpatch.verify.probes.fsdp import probe

SABOTAGE = """
import sys
if "FLASHPATCH" in __import__("os").environ:
    import flashpatch.patches._shared.fingerprint as fingerprint
    fingerprint.of = lambda *args, **kwargs: (0, 0)  # which add up to what they are, over any ranks"""


ANSWER = [-1.0, -2.0]
GOOD: dict[str, Any] = {
    "before": [[-1.0, -1.5]],
    "wanted": [ANSWER],
    "transfers": [
        {"error": "", "answers": [ANSWER]},
        {"error": f"refused: {probe.VICTIM} has other values"},
        {"error": "", "answers": [ANSWER]},
    ],
}


def verdicts(seen: dict[str, Any]) -> list[bool]:
    return [proof.ok for proof in probe.weigh(seen, "")]


def test_a_good_run_is_proven() -> None:
    assert verdicts(GOOD) == 3 * [True]


@pytest.mark.parametrize(
    ("number", "spoilt"),
    [
        (0, {"error": "lost", "answers": [ANSWER]}),
        (1, {"error": ""}),
        (1, {"error": "refused: model.norm.weight"}),
        (2, {"error": "", "answers": [[-1.0, -2.01]]}),
        (2, {"error": "", "answers": GOOD["before"]}),
    ],
)
def test_what_is_wrong_is_not_proven(number: int, spoilt: dict[str, Any]) -> None:
    seen = copy.deepcopy(GOOD)
    seen["transfers"][number] = spoilt
    assert verdicts(seen) == [place != number for place in range(3)]


def test_a_job_that_fails_or_stops_short_is_one_failed_proof() -> None:
    assert verdicts({}) == [False]
    assert verdicts({"before": GOOD["before"], "transfers": GOOD["transfers"][:2]}) == [False]


def test_an_update_that_was_refused_is_said_with_its_reason(tmp_path: Path) -> None:
    """It left no weights to compare, which ended the probe with a KeyError."""
    refused = {"error": "PatchError: weights arrive without fingerprints", "committed": False}
    for rank in range(2):
        (tmp_path / f"rollout-{rank}.json").write_text(json.dumps([refused] * len(probe.PLAN)))
        for number in range(len(probe.PLAN)):
            torch.save({}, tmp_path / f"rollout-{rank}-{number}.pt")
    proofs = probe._weigh(tmp_path, {"model.norm.weight": torch.ones(2)}, 1.0)
    assert not any(proof.ok for proof in proofs)
    assert "without fingerprints" in proofs[0].evidence


@pytest.mark.verl
@pytest.mark.full
def test_the_probe_proves_the_family(tmp_path: Path) -> None:
    verify("fsdp", tmp_path, environment(tmp_path), 900).proven()


@pytest.mark.verl
@pytest.mark.sglang
@pytest.mark.full
def test_on_sglang(tmp_path: Path) -> None:
    import sglang_lab

    said = verify("fsdp", tmp_path, environment(tmp_path, TORCHDYNAMO_DISABLE="1"), 900).proven()
    assert f"fsdp.{sglang_lab.FRAMEWORK}.update_weights_from_tensor" in str(said.family)


@pytest.mark.verl
@pytest.mark.full
def test_a_fingerprint_that_always_agrees_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    said = verify("fsdp", tmp_path, environment(tmp_path), 900, PYTHONPATH=str(tmp_path))
    assert said.code == 1 and "it was loaded" in str(said.family)
