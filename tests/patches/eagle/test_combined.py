"""The simulator of `benchmarks/combined.py`: tokens are conserved, expectations hold, and its limits are right."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest
from combining import acceptance
from combining.measured import Measured, compare
from combining.rollout import NONE, Drafting, StepCost, simulate, train_ends
from combining.roofline import GPUS, MODELS, Roofline
from tree import TREE

LENGTHS = [1, 5, 40, 40, 300, 17, 90, 2, 1000, 60]
ROOF = Roofline(GPUS["H100"], MODELS["Qwen2.5-7B"])
TRACES = sorted((TREE / "benchmarks" / "traces").glob("*_drift.jsonl.gz"))


class Even:
    """Let every step take a second, and one more for each draft verified; prompts take none."""

    def prompt(self, tokens):
        return 0.0

    def step(self, batch, cost, context):
        return 1.0 + cost.verified


@pytest.mark.parametrize("slots", [1, 3, 100])
@pytest.mark.parametrize("times", [Even(), ROOF], ids=["even", "roofline"])
def test_every_answer_ends_once_with_its_tokens_and_slots_are_never_exceeded(slots, times):
    done = simulate(times, acceptance.eagle([1.0, 1.6, 1.9]), LENGTHS, slots, 8)
    assert done.tokens == sum(LENGTHS)
    assert sorted(place for _, place in done.ends) == list(range(len(LENGTHS)))
    assert [when for when, _ in done.ends] == sorted(when for when, _ in done.ends)
    assert max(batch for batch, *_ in done.steps) <= slots
    assert done.ends[-1][0] == pytest.approx(done.seconds)


def test_without_drafts_a_row_takes_a_step_per_token_after_the_first():
    done = simulate(Even(), [NONE], LENGTHS, 1, 8)
    assert done.seconds == pytest.approx(sum(LENGTHS) - len(LENGTHS))
    done = simulate(Even(), [NONE], LENGTHS, 100, 8)
    assert done.seconds == pytest.approx(max(LENGTHS) - 1)
    assert sum(batch * count for batch, _, count, _ in done.steps) == pytest.approx(
        sum(LENGTHS) - len(LENGTHS)
    )


def test_drafts_that_are_never_accepted_cost_their_verification_and_are_given_up():
    plain = simulate(ROOF, [NONE], LENGTHS, 4, 8).seconds
    useless = Drafting(StepCost(4, 4), acceptance.expected([0.0] * 4))
    forced = simulate(ROOF, [useless], LENGTHS, 4, 8)
    steps = sum(count for _, _, count, _ in forced.steps)
    extra = ROOF.step(4, useless.cost, 500) - ROOF.step(4, NONE.cost, 500)
    assert forced.seconds > plain
    assert forced.seconds - plain == pytest.approx(steps * extra, rel=0.05)
    assert simulate(ROOF, [NONE, useless], LENGTHS, 4, 8).seconds == pytest.approx(plain)


@pytest.mark.parametrize("chances", [[0.7, 0.6, 0.5], [0.9] * 4, [0.0, 1.0], []])
def test_the_mean_tokens_of_a_step_and_of_an_answer_are_those_of_drawn_ones(chances):
    draw = random.Random(1)

    def step():
        gained = 1
        for chance in chances:
            if draw.random() >= chance:
                break
            gained += 1
        return gained

    assert fmean(step() for _ in range(40_000)) == pytest.approx(acceptance.expected(chances), rel=0.01)
    way = Drafting(StepCost(len(chances)), acceptance.expected(chances))
    taken = []
    for _ in range(4000):
        left, count = 59, 0
        while left > 0:
            left -= step()
            count += 1
        taken.append(count)
    simulated = simulate(Even(), [way], [60], 1, 8).seconds / (1 + len(chances))
    assert simulated == pytest.approx(fmean(taken), rel=0.02)


def test_the_roofline_is_bound_by_memory_in_the_tail_and_by_arithmetic_in_a_full_batch():
    fp8 = Roofline(GPUS["H100"], MODELS["Qwen2.5-7B"], bits=8)
    four = StepCost(4)
    assert ROOF.step(1, four, 100) == pytest.approx(ROOF.step(1, NONE.cost, 100), rel=0.01)
    assert ROOF.step(512, four, 100) > 2 * ROOF.step(512, NONE.cost, 100)
    weights = MODELS["Qwen2.5-7B"].layers * MODELS["Qwen2.5-7B"].layer_weights
    saved = weights / (0.8 * 3.35e12)
    assert ROOF.step(1, NONE.cost, 1) - fp8.step(1, NONE.cost, 1) == pytest.approx(saved, rel=1e-3)
    assert 6.0e9 < weights < 7.0e9  # 6.5e9 without embeddings, says its model card


def test_recorded_acceptance_grows_with_the_drafts_and_is_no_more_than_all_of_them():
    gained = acceptance.gains(TRACES)
    assert len(gained) == 5 and gained[0] == 1.0
    assert gained == sorted(gained)
    assert all(1.0 < gain <= drafts + 1 for drafts, gain in enumerate(gained[1:], 1))


def test_training_ends_no_later_when_streamed_and_never_before_its_own_work():
    done = simulate(Even(), [NONE], LENGTHS, 4, 8)
    total = sum(LENGTHS)
    complete, streamed = train_ends(done, LENGTHS, 2.0, 1 / 8)
    assert complete == pytest.approx(done.seconds + total / 2)
    assert max(done.seconds, total / 2) < streamed < complete
    assert train_ends(done, LENGTHS, 2.0, 1.0)[1] == pytest.approx(complete)


def test_measured_steps_are_interpolated_between_batches():
    rows = [{"drafts": 0, "batch": batch, "seconds": float(batch)} for batch in (8, 2, 4)]
    times = Measured(rows, 0.5)
    assert [times.step(batch, NONE.cost, 9) for batch in (1, 2, 3, 8, 9)] == [2.0, 2.0, 3.0, 8.0, 8.0]


def test_the_check_finds_no_error_in_a_rollout_of_the_simulator_and_the_error_of_another(tmp_path):
    steps = [{"drafts": 0, "batch": b, "seconds": 1.0 + b, "tokens": 1.0, "steps": 5} for b in (1, 4)]
    seconds = simulate(Measured(steps, 0.1), [NONE], LENGTHS, 4, 0).seconds
    said = {"steps": steps, "prompt_seconds": 0.1, "slots": 4, "lengths": LENGTHS}
    said["rollouts"] = [{"drafts": 0, "seconds": s, "range": [s, s]} for s in (seconds, seconds / 2)]
    (tmp_path / "steps.json").write_text(json.dumps(said))
    right, wrong = compare(tmp_path / "steps.json")
    assert right["error"] == pytest.approx(0.0) and wrong["error"] == pytest.approx(1.0)
