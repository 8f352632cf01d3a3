"""Senders that name neither begin nor end, a tensor or a few in each call: one whole policy answers, or none does."""

import logging
import random

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.patches.fp8.refit.name_order import NameOrder

POLICIES = [toys.checkpoint(seed) for seed in range(5)]
FRESH = [toys.fresh("transposed", weights)(toys.TOKENS) for weights in POLICIES]
FAULTS = ("retry", "late retry", "last twice", "dies", "left over", "half", "overlap", "two senders")


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="flashpatch.fp8")


def calls(seed, order, size=1):
    """A whole policy in calls of ``size`` tensors."""
    items = [POLICIES[seed][place] for place in order]
    return [items[start : start + size] for start in range(0, len(items), size)]


def spoiled(fault, sent, other, rng):
    """What reaches the engine of ``sent``; ``other``: the calls of another policy in the same order."""
    at = rng.randrange(1, len(sent) - 3)
    if fault == "retry":
        return [*sent[: at + 1], sent[at], *sent[at + 1 :]]
    if fault == "late retry":
        return [*sent[: at + 3], sent[at], *sent[at + 3 :]]
    if fault == "last twice":
        return [*sent, sent[-1]]
    if fault == "dies":
        return sent[: rng.randrange(1, 4)]
    if fault == "left over":
        return [rng.choice(other), *sent]
    if fault == "half":
        return sent[len(sent) // 2 :]
    if fault == "overlap":
        return [*sent[: at + 1], *([*sent[place - 1], *sent[place]] for place in range(at + 1, len(sent)))]
    return [*sent[:at], *other, *sent[at:]]


def request(engine):
    """The policy that answers, or None where a request is refused."""
    managed = engine.managed
    managed.commit_if_complete()
    managed.expect_begin()
    if not managed.may_generate:
        assert managed.policy().why_refused()
        return None
    answer = engine.model(toys.TOKENS)
    fits = [seed for seed, fresh in enumerate(FRESH) if torch.equal(answer, fresh)]
    assert fits, "the answer is of several policies"
    return fits[0]


@pytest.mark.parametrize("changes", [False, True], ids=["one order", "another order each time"])
@pytest.mark.parametrize("known", [True, False], ids=["after a whole sync", "at first"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_sent_one_policy_answers_and_whole_updates_work_again(fault, known, changes, atomic):
    for seed in range(12):
        rng = random.Random(seed)
        engine, size = toys.engine(atomic=atomic), rng.choice((1, 1, 2))
        order = list(range(len(POLICIES[0])))

        def sync(policy, fault=None):
            if changes:
                rng.shuffle(order)
            sent = calls(policy, order, size)
            for call in sent if fault is None else spoiled(fault, sent, calls(4, order, size), rng):
                engine.load(call)
                if known and not changes and rng.random() < 0.2:
                    request(engine)
                engine.managed.commit_if_complete(more=True)  # as after any call
            return request(engine)

        if known:
            assert sync(1) == 1
        sync(2, fault)
        served = sync(3)
        assert served == 3 or (not known or changes)
        again = [sync(1) for _ in range(5 if changes else 2)]
        assert 1 in again, f"seed {seed}: whole updates are refused for ever"


def test_a_name_that_comes_again_says_how_to_go_on(atomic):
    engine = toys.engine(atomic=atomic)
    first, again, *_ = calls(1, range(len(POLICIES[0])))
    for call in (first, again, again):
        engine.load(call)
    assert "layers" in again[0][0] and f"{again[0][0]} came again" in engine.managed.policy().error
    assert "in one call, or name its end" in engine.managed.policy().why_refused()
    engine.update(POLICIES[2])
    assert request(engine) == 2


def test_a_session_goes_on_where_a_tensor_of_an_unfinished_layer_comes_again(atomic):
    engine, items = toys.engine(atomic=atomic), dict(POLICIES[1])
    q, k, v = (f"layers.0.{part}.weight" for part in "qkv")
    engine.managed.begin()
    engine.load([(q, items[q]), (k, items[k])])
    engine.load([(k, items[k]), (v, items[v]), (q, items[q])])
    engine.load([item for item in POLICIES[1] if item[0] not in (q, k, v)])
    engine.managed.finish()
    assert request(engine) == 1


def test_a_whole_update_in_one_call_after_an_unfinished_one(atomic):
    """Wherever the sender before it died, also within a layer whose tensors are fused."""
    engine = toys.engine(atomic=atomic)
    for left in range(len(POLICIES[0])):
        engine.load([POLICIES[1][left]])
        policy = 2 + left % 2
        engine.load(POLICIES[policy])
        assert request(engine) == policy, POLICIES[1][left][0]


def test_a_sender_whose_order_changes_is_in_doubt_until_it_is_framed():
    """What an update left behind and what the next one brings first may be in the order that was learned."""
    names = NameOrder()
    for call, name in enumerate("abcd", start=1):
        names.add(name, call)
    names.learn(named=False)
    names.clear()
    for call, name in enumerate("cdab" * 3, start=1):
        if names.ends(name, call):
            names.restart(name, call, complete=len(names.came) == 4)
        names.add(name, call)
        assert names.in_one_call or not names.whole()
