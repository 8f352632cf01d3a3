"""The family on a real SGLang engine that drafts: lossless, aligned, adaptive, and drafters exchanged."""

from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest

pytestmark = pytest.mark.sglang(least="0.5.17")

lab = eagles.lab

TREE = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
CHAINS = ["3_1_4", "2_1_3", "1_1_2", "disable"]
TREES = ["3_2_6", "3_1_4", "2_1_3", "2_2_4", "1_1_2", "disable"]


def ids(step: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["ids"] for answer in step]


def worker(seen: Any) -> dict[str, Any]:
    [row] = [row for row in lab.rows(seen) if "worker" in row["roles"]]
    return row


@pytest.fixture(scope="module")
def half(models: Path) -> tuple[str, str]:
    """A target that its drafter gets right now and then."""
    target = eagles.target(models, 0.02)
    return target, eagles.drafter(models, target, "half", exact=True)


def test_another_arm_at_every_step_changes_no_token(half: tuple[str, str], tmp_path: Path) -> None:
    """Log-probabilities are those of a forward then too."""
    import torch
    from eagle_reference import logprobs_of

    target, drafter = half
    asks = [["tokens", dict(count=48)], ["tokens", dict(count=30, prompts=[[9, 8, 7]])], ["logprobs", {}]]
    common = dict(model=target, steps=asks)
    turning = dict(speculative_draft_model_path=drafter, flashpatch="eagle", env={"JOB_ROTATE": "1"})
    seen = lab.together(
        tmp_path,
        dict(common, **eagles.PLAIN),
        dict(common, **turning, **{**eagles.SPECULATIVE, **TREE}, options={"eagle": dict(arms=TREES)}),
        dict(common, **turning, **eagles.SPECULATIVE, options={"eagle": dict(arms=CHAINS)}),
    )
    for one in seen:
        assert one.done, str(one)
    alone, trees, chains = (one.steps for one in seen)
    for number in range(len(asks)):
        assert ids(alone[number]) == ids(chains[number]) == ids(trees[number])
    for answer in [*trees[2], *chains[2]]:
        assert len(answer["ids"]) == len(answer["logprobs"]) == 24
        wanted = logprobs_of(target, answer["prompt"], answer["ids"])
        assert torch.allclose(torch.tensor(answer["logprobs"]), wanted, atol=2e-4)
    assert any(answer["accept"] > 1.2 for answer in trees[0]), "no draft was ever accepted: nothing is shown"
    for one, arms in ((seen[1], TREES), (seen[2], CHAINS)):
        row = worker(one)
        assert row["notes"]["eagle_arms"] == arms
        assert row["patches"]["eagle.sglang.on_verify_complete_cpu"]["calls"] > 2 * len(arms)
    assert worker(seen[1])["patches"]["eagle.sglang.activate_step_by_batch"]["calls"] > 2 * len(TREES)


def test_captured_states_are_those_of_a_forward(half: tuple[str, str], tmp_path: Path) -> None:
    """Tokens, positions and states against a Hugging Face forward of the same sequence; cached prefixes are masked."""
    from eagle_reference import check_samples

    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    target, drafter = half
    shared = list(range(40, 72))
    prompts = [[*shared, 3, 4, 5], list(range(200, 221)), [7, 8, 9]]
    steps = [
        ["tokens", dict(count=20, prompts=prompts)],
        ["tokens", dict(count=8, prompts=[[*shared, 6, 7]])],
    ]
    seen = lab.run(
        tmp_path,
        model=target,
        speculative_draft_model_path=drafter,
        steps=[*steps, ["pause", dict(seconds=1.5)]],
        chunked_prefill_size=16,
        flashpatch="eagle",
        options={"eagle": dict(samples="{where}/queue", adapt=False)},
        **{**eagles.SPECULATIVE, **TREE, "disable_radix_cache": False},
    )
    assert seen.done, str(seen)
    answers = {
        tuple(p): a["ids"]
        for step, asked in zip(seen.steps, steps)
        for p, a in zip(asked[1]["prompts"], step)
    }
    samples = SampleReader(seen.where / "queue").read_samples(10)
    check_samples(target, samples, answers, len(shared))


@pytest.mark.sglang(least="0.5.21")  # before, only by path
def test_a_drafter_is_updated_while_the_engine_runs(models: Path, tmp_path: Path) -> None:
    target = eagles.target(models, 0.0)
    exact, random = (eagles.drafter(models, target, one, exact=one == "exact") for one in ("exact", "random"))
    many = ["tokens", dict(count=80)]
    worse, better = (["update", dict(source=one, selector="draft")] for one in (random, exact))
    seen = lab.run(
        tmp_path,
        model=target,
        speculative_draft_model_path=exact,
        steps=[many, worse, many, better, many],
        flashpatch="eagle",
        options={"eagle": dict(adapt=False)},
        **eagles.SPECULATIVE,
    )
    assert seen.done, str(seen)
    first, _, low, _, again = seen.steps
    lengths = [max(a["accept"] for a in step) for step in (first, low, again)]
    assert lengths[0] > 3.9 and lengths[1] < 1.5 and lengths[2] > 3.9, lengths
    assert ids(first) == ids(low) == ids(again)
    found = worker(seen)["notes"]["eagle_drafter"]
    assert found["version"] == 2 and found["log"][0]["before"] > 3.9 > 1.5 > found["log"][1]["before"]


@pytest.mark.full
def test_the_bandit_gives_up_a_useless_drafter(models: Path, tmp_path: Path) -> None:
    """Nothing is accepted, so speculation ends up disabled, and output stays what it is without."""
    target = eagles.target(models, 1.0)
    drafter = eagles.drafter(models, target, "useless", exact=False)
    steps = [["tokens", dict(count=150)], ["tokens", dict(count=150)]]
    seen = lab.together(
        tmp_path,
        dict(model=target, steps=steps, **eagles.PLAIN),
        dict(
            model=target,
            steps=steps,
            speculative_draft_model_path=drafter,
            flashpatch="eagle",
            options={"eagle": dict(arms=["3_1_4", "disable"])},
            **eagles.SPECULATIVE,
        ),
    )
    assert all(one.done for one in seen), str(seen[1])
    assert ids(seen[0].steps[1]) == ids(seen[1].steps[1])
    # now and then it looks at the other arm again
    recent = worker(seen[1])["notes"]["eagle_bandit"]["recent"]
    assert recent.count("disable") > len(recent) / 2, recent
