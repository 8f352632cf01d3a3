"""How a worker's requests become history, on throw-away requests."""

from types import SimpleNamespace

import pytest

from flashpatch.patches.eagle.sglang import history_drafts
from flashpatch.patches.eagle.sglang.history_drafts import WorkerHistory

ANSWER = [50, 51, 52, 53, 54, 55, 56, 57]


class Request:
    """What is read of SGLang's ``Req``."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.origin_input_ids, self.output_ids = prompt, answer


@pytest.fixture
def history() -> WorkerHistory:
    return WorkerHistory(100_000)


def answered(history: WorkerHistory, prompt: list[int]) -> None:
    """Let a request to ``prompt`` be answered, a token per step."""
    request = Request(prompt, ANSWER[:1])
    for token in ANSWER[1:]:
        history.propose([request], 3)
        request.output_ids = [*request.output_ids, token]
        history.steps += 1


def test_the_last_tokens_of_a_request_that_is_over_are_remembered(history: WorkerHistory) -> None:
    answered(history, [1, 2, 3])
    history.propose([Request([9, 9], [8])], 3)
    assert history.propose([Request([1, 2, 3], ANSWER[:5])], 3) == [ANSWER[5:]]
    assert history.rows == {0}


def test_accepted_drafts_are_learned_from_the_next_step(history: WorkerHistory) -> None:
    answered(history, [1, 2, 3])
    request = Request([1, 2, 3], ANSWER[:2])
    assert history.propose([request], 3) == [ANSWER[2:5]]
    before = history.drafts.accepted
    request.output_ids = [*ANSWER[:5], 99]
    history.steps += 1
    history.propose([request], 3)
    assert history.drafts.accepted == before + 3


def test_tokens_of_steps_without_drafts_are_no_acceptance(history: WorkerHistory) -> None:
    answered(history, [1, 2, 3])
    request = Request([1, 2, 3], ANSWER[:2])
    history.propose([request], 3)
    before = history.drafts.drafts
    request.output_ids = ANSWER[:4]
    history.steps += 2  # the bandit stopped speculation for one of them
    history.propose([request], 3)
    assert history.drafts.drafts == before


def test_what_history_drafted_says_nothing_about_the_drafter(history, monkeypatch):
    """Of a batch, only requests with the drafter's own drafts count for its acceptance."""
    worker = SimpleNamespace(_draft_worker=Request([], []))
    monkeypatch.setitem(history_drafts._histories, worker._draft_worker, history)
    answered(history, [1, 2, 3])
    history.propose([Request([9, 9], [8]), Request([1, 2, 3], ANSWER[:2])], 3)
    assert history_drafts.batch_verified(worker, [2, 3]) == [2]
    assert history_drafts.batch_verified(worker, [0, 0]) == [0, 0], "this one was not drafted for"
