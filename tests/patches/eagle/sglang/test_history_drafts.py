"""Drafts from history on SGLang: more tokens per step, the same answers."""

from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest

pytestmark = pytest.mark.sglang(least="0.5.17")

lab = eagles.lab

CLOSE = 5e-4  # largest difference to Hugging Face in float32; the kernels add up in another order
ASK = ["tokens", dict(count=48)]
HISTORY: dict[str, Any] = dict(flashpatch="eagle", options={"eagle": dict(history=True)})


@pytest.fixture(scope="module")
def target(models: Path) -> str:
    return eagles.target(models, 0.02)


@pytest.fixture(scope="module")
def useless(models: Path, target: str) -> dict[str, Any]:
    """Keywords of an engine with a drafter of noise."""
    drafter = eagles.drafter(models, target, "useless", exact=False)
    return dict(eagles.SPECULATIVE, speculative_draft_model_path=drafter)


@pytest.fixture(scope="module")
def seen(target: str, useless: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engines asked the same three times: without speculation, with history, with a drafter, with both."""
    common: dict[str, Any] = dict(model=target, steps=[ASK, ASK, ["logprobs", {}]])
    always = {"eagle": dict(history=True, arms=["3_1_4"])}
    jobs = {
        "off": dict(common, **eagles.PLAIN, flashpatch="eagle"),
        "history": dict(common, **eagles.PLAIN, **HISTORY),
        "drafter": dict(common, **useless),
        "both": dict(common, **useless, flashpatch="eagle", options=always),
    }
    found = dict(zip(jobs, lab.together(tmp_path_factory.mktemp("history"), *jobs.values())))
    for one in found.values():
        assert one.done, str(one)
    return found


def accepted(step: list[dict[str, Any]]) -> float:
    """The fewest tokens per step of a request."""
    return min(answer["accept"] for answer in step)


def test_an_answer_that_was_given_before_takes_a_fraction_of_the_steps(seen: dict[str, Any]) -> None:
    assert accepted(seen["history"].steps[1]) > 5
    assert accepted(seen["both"].steps[1]) > 3
    assert max(answer["accept"] for answer in seen["drafter"].steps[1]) < 1.3, "the drafter is to be useless"
    assert seen["off"].steps[1][0]["accept"] is None, "the option is to open speculation, and nothing else"


def test_greedy_tokens_are_those_without_drafts(seen: dict[str, Any]) -> None:
    first, again = ([answer["ids"] for answer in step] for step in seen["off"].steps[:2])
    assert first == again
    for one in seen.values():
        assert [[answer["ids"] for answer in step] for step in one.steps[:2]] == [first, first]


@pytest.mark.parametrize("engine", ["history", "both"])
def test_log_probabilities_are_those_of_a_forward(seen: dict[str, Any], target: str, engine: str) -> None:
    import torch
    from eagle_reference import logprobs_of

    for answer in seen[engine].steps[2]:
        wanted = logprobs_of(target, answer["prompt"], answer["ids"])
        assert float((wanted - torch.tensor(answer["logprobs"])).abs().max()) < CLOSE


@pytest.mark.parametrize("engine", ["history", "both"])
def test_the_ledger_has_what_was_drafted(seen: dict[str, Any], engine: str) -> None:
    [worker] = [row for row in lab.rows(seen[engine]) if "worker" in row["roles"]]
    assert worker["notes"]["eagle_history"]["prompts"] == 3


@pytest.mark.full
def test_a_drafter_of_trees_keeps_its_drafts(target: str, useless: dict[str, Any], tmp_path: Path) -> None:
    tree = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
    one = lab.run(tmp_path, model=target, steps=[ASK, ASK], **{**useless, **tree}, **HISTORY)
    assert one.done, str(one)
    assert "no drafts from history: the drafter drafts trees" in one.log
    assert accepted(one.steps[1]) < 1.3
