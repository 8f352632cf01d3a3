"""The family's own proof: how it judges what is in the ledger, and on real engines, where it says no under sabotage."""

from pathlib import Path
from typing import Any

import pytest
from verify_command import verify

pytest.importorskip("torch")

from flashpatch.verify.probes.eagle.probe import bandit_adapts, drafter_follows


def log(*before: float, first: int = 1) -> dict[str, Any]:
    """Notes of updates, each with the acceptance length before it."""
    updates = [dict(version=number, path="", before=length) for number, length in enumerate(before, first)]
    return {"eagle_drafter": {"version": 3, "path": "", "log": updates}}


@pytest.mark.parametrize(
    ("notes", "good"),
    [
        (log(3.9, 1.1, 3.9), True),
        (log(3.9, 3.8, 3.9), False),
        (log(1.2, 1.1, 3.9), False),
        (log(3.9, 1.1, 1.2), False),
        (log(3.9, 0.0, 3.9), False),
        (log(3.9, 1.1), False),
        ({}, False),
    ],
)
def test_how_acceptance_after_updates_is_judged(notes: dict[str, Any], good: bool) -> None:
    assert drafter_follows(notes)[0] is good


def test_an_update_under_another_version_is_named() -> None:
    good, evidence = drafter_follows(log(3.9, 1.1, 3.9, first=2))
    assert not good and "versions [2, 3, 4]" in evidence


@pytest.mark.parametrize(
    ("found", "good"),
    [
        ({"steps": 90.0, "batch_4/3_1_4/pulls": 60.0, "batch_4/disable/pulls": 30.0}, True),
        ({"steps": 90.0, "batch_4/3_1_4/pulls": 60.0, "batch_2/3_1_4/pulls": 30.0}, False),
        ({"steps": 90.0, "batch_4/3_1_4/pulls": 90.0, "batch_4/disable/pulls": 0.0}, False),
        ({"steps": 9.0, "batch_4/3_1_4/pulls": 5.0, "batch_4/disable/pulls": 4.0}, False),
        (None, False),
    ],
)
def test_how_the_bandits_choices_are_judged(found: Any, good: bool) -> None:
    assert bandit_adapts({"eagle_bandit": found})[0] is good


def test_an_engine_without_the_bandit_says_why() -> None:
    assert (
        "a schedule of the user's own"
        in bandit_adapts({"eagle_bandit_off": "a schedule of the user's own"})[1]
    )


@pytest.mark.sglang(least="0.5.17")
@pytest.mark.full
def test_on_sglang(tmp_path: Path) -> None:
    import eagle_engines

    said = verify("eagle", tmp_path, eagle_engines.lab.environment(tmp_path)).proven()
    assert len(said.proofs) > 5


@pytest.mark.vllm
@pytest.mark.full
def test_on_vllm(tmp_path: Path) -> None:
    assert len(verify("eagle", tmp_path).proven().proofs) > 5


@pytest.mark.vllm
def test_without_the_sampling_patch_nothing_is_proven(tmp_path: Path) -> None:
    """vLLM then reads temperatures and numbers of top-k from memory that nobody wrote: other tokens, or the engine's end."""
    import mutant_runs

    said = mutant_runs.verdict("eagle", tmp_path, "bypass eagle.vllm.expand_kernel_impl")
    alone = any(one.startswith("tokens are the target's alone") for one in said.by)
    assert said.code == 1 and (alone or "EngineDeadError" in str(said.family["proofs"]))
