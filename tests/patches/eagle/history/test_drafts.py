"""How long drafts from history are: what is expected of them, what they cost, what they learn from."""

import itertools
import random

import pytest

from flashpatch.patches.eagle.history.drafts import AcceptanceTable, HistoryDrafts, draft_lengths
from flashpatch.patches.eagle.history.step_cost import StepCost
from flashpatch.patches.eagle.history.token_index import Guess


def test_lengths_are_those_with_the_most_tokens_per_second():
    random.seed(1)
    for _ in range(100):
        chances = [sorted((random.random() for _ in range(3)), reverse=True) for _ in range(3)]
        base, slope = 1.0, random.choice((0.0, 0.02, 0.1, 0.3, 2.0))

        def rate(lengths, chances=chances, base=base, slope=slope):
            tokens = sum(1 + sum(found[:length]) for found, length in zip(chances, lengths))
            return tokens / (base + slope * sum(lengths))

        best = max(map(rate, itertools.product(range(4), repeat=3)))
        assert rate(draft_lengths(chances, base, slope)) == pytest.approx(best)


def test_chances_follow_what_was_accepted():
    table = AcceptanceTable(sources=2)
    sure = [Guess(token=1, match=12, votes=3, total=3)] * 4
    vague = [Guess(token=1, match=2, votes=1, total=3)] * 4
    before = table.chances(0, sure)
    assert before[0] > table.chances(0, vague)[0] and before == sorted(before, reverse=True)
    for _ in range(300):
        table.learn(0, sure, accepted=4)
        table.learn(0, vague, accepted=0)
    assert table.chances(0, sure)[3] > 0.95 and table.chances(0, vague)[0] < 0.05
    assert table.chances(1, sure) == before, "the other source has its own"
    for _ in range(600):
        table.learn(0, sure, accepted=0)
    assert table.chances(0, sure)[0] < 0.1, "the policy changed"


@pytest.mark.parametrize("share", [0.005, 0.05, 0.3])
def test_base_and_slope_of_steps_are_learned_through_noise(share):
    random.seed(2)
    cost = StepCost()
    assert cost.estimate(4) is None
    for _ in range(400):
        for batch in (1, 4, 32):
            drafts = random.randrange(0, 4 * batch)
            seconds = 0.01 * (1 + batch / 8) * (1 + share * drafts) * random.uniform(0.9, 1.1)
            if random.random() < 0.02:
                seconds *= 50  # somebody else's work
            cost.observe(batch, drafts, seconds)
    for batch in (1, 4, 32):
        base, slope = cost.estimate(batch)
        full = base + slope * 4 * batch
        assert full == pytest.approx(0.01 * (1 + batch / 8) * (1 + share * 4 * batch), rel=0.5)


def _rollout(drafts: HistoryDrafts, answers: list[list[int]], slope: float) -> float:
    """Generate fixed answers in one batch; return the seconds, where a step takes 1 and each draft token ``slope``."""
    texts = [drafts.begin([1, 2, 3]) for _ in answers]
    places, total = [0] * len(answers), 0.0
    while live := [row for row, answer in enumerate(answers) if places[row] < len(answer)]:
        proposed = drafts.propose(
            [texts[row] for row in live], [min(8, len(answers[row]) - places[row] - 1) for row in live]
        )
        outcomes, drafted = {}, 0
        for row, draft in zip(live, proposed, strict=True):
            rest = answers[row][places[row] :]
            accepted = 0
            for token in draft or ():
                if token != rest[accepted]:
                    break
                accepted += 1
            outcomes[texts[row]] = accepted
            drafted += len(draft or ())
            drafts.extend(texts[row], rest[: accepted + 1])
            places[row] += accepted + 1
        seconds = 1.0 + slope * drafted
        drafts.learn(outcomes, len(live), drafted, seconds)
        total += seconds
    return total


def test_an_epoch_that_repeats_answers_is_several_times_faster():
    random.seed(4)
    drafts = HistoryDrafts(capacity=10_000)
    answers = [[random.randrange(10, 500) for _ in range(64)] for _ in range(4)]
    first, second = (_rollout(drafts, answers, slope=0.02) for _ in range(2))
    assert first < 64 * 1.03 and second < first / 3


@pytest.mark.parametrize("slope", [0.05, 0.5])
def test_answers_that_never_repeat_cost_next_to_nothing(slope):
    random.seed(5)
    drafts = HistoryDrafts(capacity=100_000)
    total = stock = 0.0
    for _ in range(20):
        # matches abound, and mean nothing
        answers = [[random.randrange(8) for _ in range(64)] for _ in range(4)]
        total += _rollout(drafts, answers, slope)
        stock += 64
    assert total < stock / 0.97


def test_a_better_drafter_keeps_its_drafts():
    drafts = HistoryDrafts(capacity=10_000)
    text = drafts.begin([1, 2, 3, 4, 1, 2])
    drafts.learn({}, batch_size=1, draft_tokens=0, seconds=1.0)
    for _ in range(200):
        drafts.learn_rival(drafted=4, accepted=4)
    assert drafts.propose([text], room=[4], rivals=[4]) == [None]
    for _ in range(400):
        drafts.learn_rival(drafted=4, accepted=0)
    drafts.learn({}, batch_size=1, draft_tokens=4, seconds=1.0)
    assert drafts.propose([text], room=[4], rivals=[4]) == [[3, 4, 1, 2]]


def test_drafts_fit_into_the_room_that_is_left():
    drafts = HistoryDrafts(capacity=10_000)
    text = drafts.begin([1, 2, 3, 4, 5, 6, 1, 2])
    drafts.learn({}, batch_size=1, draft_tokens=0, seconds=1.0)
    drafts.learn({}, batch_size=1, draft_tokens=8, seconds=1.0)
    for room in (0, 1, 2):
        [draft] = drafts.propose([text], [room])
        assert len(draft or ()) <= room


def test_prompts_that_were_not_asked_for_long_are_forgotten():
    drafts = HistoryDrafts(capacity=1000)
    for number in range(100):
        drafts.extend(drafts.begin([number, *range(50)]), list(range(60)))
    assert drafts.metrics()["prompts"] < 20
    assert drafts.begin([99, *range(50)]).index is drafts.begin([99, *range(50)]).index
