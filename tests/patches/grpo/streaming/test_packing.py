"""Packing samples into rounds: nothing lost, nothing twice, budgets kept, ranks in step."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming.packing import Packer
from flashpatch.patches.grpo.streaming.rounds import Rounds

LENGTHS = st.lists(st.integers(1, 40), max_size=120)


def packed(packer: Packer, lengths: list[int]) -> list:
    rounds = [done for number, tokens in enumerate(lengths) for done in packer.add((number, tokens), tokens)]
    last = packer.flush()
    return rounds + ([last] if last else [])


def real(batches) -> list:
    return [sample for batch in batches if not batch.filler for sample in batch.samples]


def test_workers_that_share_a_ranks_samples_have_their_budgets_together():
    for ranks, budget in (([0, 1, 2, 3], 100), ([0, 0, 1, 1], 200), ([0] * 4, 400)):
        rounds = Rounds(SimpleNamespace(_dispatch_info={"actor": ranks}), None, 100, {})
        assert (rounds.packer.ranks, rounds.packer.budget) == (max(ranks) + 1, budget)


@settings(max_examples=200)
@given(ranks=st.integers(1, 9), budget=st.integers(5, 60), lengths=LENGTHS)
def test_every_sample_is_in_exactly_one_batch_within_the_budget(ranks, budget, lengths):
    rounds = packed(Packer(ranks, budget), lengths)
    assert sorted(real(batch for done in rounds for batch in done)) == list(enumerate(lengths))
    for number, done in enumerate(rounds):
        assert [batch.rank for batch in done] == list(range(ranks))
        assert all(batch.round == number and batch.samples for batch in done)
        for batch in done:
            assert batch.tokens == sum(tokens for _, tokens in batch.samples) or batch.filler
            assert batch.tokens <= budget or len(batch.samples) == 1
        fillers = sum(batch.filler for batch in done)
        if number < len(rounds) - 1:
            assert not fillers, "only the last round may lack samples"
        else:
            assert fillers == max(0, ranks - len(real(done)))


@settings(max_examples=100)
@given(ranks=st.integers(1, 6), budget=st.integers(20, 90), lengths=LENGTHS)
def test_a_round_leaves_when_the_next_sample_has_no_room_and_not_before(ranks, budget, lengths):
    packer, room = Packer(ranks, budget), [budget] * ranks
    for tokens in lengths:
        done = list(packer.add(tokens, tokens))
        # One over the budget needs an empty rank; else the fullest that can take it, or the emptiest of all.
        able = [free for free in room if free >= min(tokens, budget)]
        assert len(done) == (not able)
        if not able:
            able = room = [budget] * ranks
        room[room.index(min(able))] -= tokens
    assert packer.waiting == len(real(packer.flush() or ()))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_little_of_the_ranks_time_is_lost(ranks):
    draw = random.Random(0)
    lengths = [min(int(draw.lognormvariate(4, 1)) + 1, 2000) for _ in range(400 * ranks)]
    divided = packed(Packer(ranks, 2000), lengths)
    assert max(batch.tokens for done in divided for batch in done) <= 2000
    # The last round is as full as samples are left; of the others' time little is lost.
    # Each rank waits for the fullest of its round.
    of_rounds = [[batch.tokens for batch in done] for done in divided[:-1]]
    assert sum(map(sum, of_rounds)) > 0.97 * sum(len(tokens) * max(tokens) for tokens in of_rounds)


def test_a_sample_without_tokens_is_refused_by_name():
    with pytest.raises(PatchError, match="sample 'x' has 0 tokens"):
        Packer(1, 10).add("x", 0)
