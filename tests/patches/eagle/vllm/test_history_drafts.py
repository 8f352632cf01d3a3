"""Drafts from history on an engine: fewer steps, the same answers, the target's distribution."""

import pytest
import torch
from eagle_reference import check_distribution, logprobs_of

pytestmark = pytest.mark.vllm

CLOSE = 2e-4  # largest difference to Hugging Face in float32; the kernels add up in another order


@pytest.fixture(scope="module")
def run(job):
    return job("history")


def test_an_answer_that_was_given_before_takes_a_fraction_of_the_steps(run):
    seen, _ = run
    assert seen["first_steps"] >= 40 and seen["capacity"] == 300_000
    assert seen["again_steps"] < seen["first_steps"] / 3


def test_greedy_tokens_are_those_without_drafts(run):
    seen, _ = run
    assert seen["aborted_in_step"], "no request was aborted between a step and its update: the test is empty"
    wanted = [row["tokens"] for row in seen["first"]]
    assert [row["tokens"] for row in seen["again"]] == wanted
    assert [row["tokens"] for row in seen["after"]] == wanted, "after aborted and preempted requests"


def test_logprobs_are_those_of_a_forward(run):
    seen, at = run
    for row in seen["again"] + seen["sampled"]:
        wanted = logprobs_of(at / "target", row["prompt"], row["tokens"])
        assert float((wanted - torch.tensor(row["logprobs"])).abs().max()) < CLOSE


def test_sampled_tokens_have_the_targets_distribution(run):
    seen, at = run
    assert seen["accepted_by_many"] > 50 and seen["drafted_by_many"] > seen["accepted_by_many"] + 50
    check_distribution(at / "target", [7, 11, 5], seen["many"], 32)


def test_requests_that_speculation_cannot_serve_go_undrafted_beside_others(run):
    seen, _ = run
    greedy = seen["first"][0]["tokens"]
    for plain, smallest, biased, _ in seen["undrafted"]:
        assert plain == smallest == greedy and set(biased) == {5}


@pytest.mark.vllm(least="0.32")
def test_a_seed_repeats_its_answer(run):
    seen, _ = run
    greedy = seen["first"][0]["tokens"]
    first, again = (answers[3] for answers in seen["undrafted"])
    assert first == again != greedy


def test_asynchronous_scheduling_is_refused_by_name(run):
    seen, _ = run
    assert "async_scheduling=True" in seen["refused"] and "history to false" in seen["refused"]


def test_a_fault_turns_history_off_and_no_answer_suffers(run):
    seen, _ = run
    assert [row["tokens"] for row in seen["faulty"]] == [row["tokens"] for row in seen["first"]]
    assert "'NoneType' object is not callable" in seen["notes"]["eagle_history_off"]


def test_beside_a_drafter_history_takes_over_and_teaches_no_arm(job):
    seen, _ = job("history_beside")
    assert [row["tokens"] for row in seen["again"]] == [row["tokens"] for row in seen["first"]]
    assert seen["again_steps"] < seen["first_steps"] / 2
    counted, drafted_by_drafter, drafted, accepted = seen["again_counts"]
    assert drafted > 0 and accepted > 0.8 * drafted
    assert counted < seen["again_steps"] / 2 and drafted_by_drafter < drafted
    assert not seen["captured"], "states that nobody has asked for"
