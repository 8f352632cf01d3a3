"""Requests that sample on a real engine that drafts: tokens and log-probabilities are the target's.

The stand-in operators verify, so this is about SGLang's own way to them. An engine's seed is fixed, but how requests
meet in batches is not: a right engine fails each of a test's six chi-squares with probability `ALARM`, so a test fails
once in 16,000 runs."""

from functools import cache
from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest
import torch
from chi_square import chance_of_next
from eagle_reference import filtered, logprobs_of, probabilities

pytestmark = pytest.mark.sglang(least="0.5.17")

lab = eagles.lab

ALARM = 1e-5
#: Beginnings seen this often have their next token compared.
LEAST = 20
PROMPT = [7, 11, 5]
TREE = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
TREES = ["3_2_6", "3_1_4", "2_1_3", "2_2_4", "1_1_2", "disable"]
PLAIN = dict(times=2000, count=4, temperature=1.0, greedy=6)
CUT = dict(times=1000, count=4, temperature=1.2, min_p=0.3, greedy=6)
FILTERED = dict(times=1000, count=4, temperature=1.2, top_k=12, top_p=0.8, greedy=6)


@pytest.fixture(scope="module")
def sharp(models: Path) -> tuple[str, str]:
    """A target with most of its mass on a few tokens, and a drafter that often has one of them."""
    target = eagles.target(models, 0.02, sharp=3.6)
    return target, eagles.drafter(models, target, "sharp", exact=True)


def run(folder: Path, sharp: tuple[str, str], asks: tuple[Any, ...] = (PLAIN, FILTERED), **more: Any):
    target, drafter = sharp
    asked = [["sampled", dict(one, prompt=PROMPT)] for one in asks]
    seen = lab.run(
        folder,
        model=target,
        steps=[*asked, ["tokens", dict(count=4, prompts=[PROMPT])]],
        **{
            **eagles.SPECULATIVE,
            **TREE,
            "speculative_draft_model_path": drafter,
            "max_running_requests": 64,
            **more,
        },
    )
    assert seen.done, str(seen)
    return seen.steps


def check(target: str, steps: list[Any], asks: tuple[Any, ...] = (PLAIN, FILTERED)) -> None:
    """Distribution of every token, log-probabilities, and greedy requests of the same batches."""
    *sampled, [greedy] = steps
    for answers, asked in zip(sampled, asks):
        own, others = answers[: asked["times"]], answers[asked["times"] :]
        assert len(others) == asked["greedy"] and all(one["ids"] == greedy["ids"] for one in others)
        assert len({tuple(one["ids"]) for one in own}) > 50, "samples of a prompt hardly differ"
        _check_tokens(target, own, asked)
        _check_logprobs(target, own, asked["temperature"])
    assert sum(one["accept"] for one in sampled[0]) / len(sampled[0]) > 1.5, "hardly a draft was accepted"


def _check_tokens(target: str, answers: list[Any], asked: dict[str, Any]) -> None:
    """The first token comes from SGLang's sampler, which filters in another order; verification gives the rest."""

    @cache
    def after(beginning: tuple[int, ...]) -> torch.Tensor:
        probs = probabilities(target, [[*PROMPT, *beginning]])[0].log()
        row = (probs / asked["temperature"]).softmax(-1)
        if "min_p" in asked:
            row = row.masked_fill(row < asked["min_p"] * row.max(), 0)
            return row / row.sum()
        if "top_k" not in asked:
            return row
        return torch.tensor(filtered(row.tolist(), asked["top_k"], asked["top_p"]), dtype=torch.float64)

    for position in range(1, asked["count"]):
        p, about = chance_of_next([one["ids"] for one in answers], position, after, LEAST)
        assert about > len(answers) / 4, "beginnings differ too much for a test"
        assert p > ALARM, (asked, position)


def _check_logprobs(target: str, answers: list[Any], temperature: float) -> None:
    """SGLang reports them at the request's temperature, before filters."""
    for ids, said in {tuple(one["ids"]): one["logprobs"] for one in answers}.items():
        wanted = logprobs_of(target, PROMPT, list(ids), temperature)
        assert torch.allclose(torch.tensor(said), wanted, atol=5e-4), ids


@pytest.mark.full
def test_samples_are_the_targets_with_another_arm_at_every_step(sharp: tuple[str, str], tmp_path: Path):
    """Chains, trees and none, as the bandit may choose."""
    how = dict(flashpatch="eagle", env={"JOB_ROTATE": "1"}, options={"eagle": dict(arms=TREES)})
    check(sharp[0], run(tmp_path, sharp, **how))


@pytest.mark.full
@pytest.mark.parametrize("drafter", [True, False], ids=["beside a drafter", "alone"])
def test_samples_are_the_targets_with_drafts_from_history(sharp, tmp_path, drafter):
    """A thousand answers to one prompt, so that most drafts are those of other answers."""
    how: dict[str, Any] = dict(flashpatch="eagle", options={"eagle": dict(history=True, arms=["3_1_4"])})
    chain: dict[str, Any] = dict(speculative_eagle_topk=1, speculative_num_draft_tokens=4)
    if not drafter:
        chain = dict.fromkeys(name for name in eagles.SPECULATIVE if name.startswith("speculative"))
        chain["speculative_draft_model_path"] = None
    asks = (PLAIN, FILTERED, CUT)
    check(sharp[0], run(tmp_path, sharp, asks, **how, **chain), asks)
