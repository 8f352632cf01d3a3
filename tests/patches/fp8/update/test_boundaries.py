"""Senders that name neither begin nor end, a tensor or a few in each call: one whole policy answers, or none does."""

import logging
import random

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.boundaries import Boundaries, Step

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
    managed.before_request()
    if not managed.may_generate:
        assert managed.policy().why_refused()
        return None
    answer = engine.model(toys.TOKENS)
    fits = [seed for seed, fresh in enumerate(FRESH) if torch.equal(answer, fresh)]
    assert fits, "the answer is of several policies"
    return fits[0]


def sync(engine, sent, asked=lambda: False):
    """Send calls, until one raises; return the policy that answers then. ``asked``: whether a request comes after a call."""
    for call in sent:
        try:
            engine.load(call)
        except PatchError as error:
            assert "where this update begins cannot be told" in error.problem
            assert "`with flashpatch.update(engine):`" in error.problem
            break
        engine.managed.after_call()
        if asked():
            request(engine)
    return request(engine)


@pytest.mark.parametrize("known", [True, False], ids=["after a whole sync", "at first"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_sent_one_policy_answers_and_the_next_whole_update_works(fault, known, atomic):
    for seed in range(6):
        rng = random.Random(seed)
        engine, size = toys.engine(atomic=atomic), rng.choice((1, 1, 2))
        order = list(range(len(POLICIES[0])))
        if known:
            assert sync(engine, calls(1, order, size), lambda: rng.random() < 0.2) == 1
        broken = spoiled(fault, calls(2, order, size), calls(4, order, size), rng)
        # a sender vouches for the beginning of its very first update: nothing has shown it
        vouched = known or broken[0][0][0] == POLICIES[0][0][0]
        assert sync(engine, broken, lambda: vouched and rng.random() < 0.2) in (0, 1, 2, 4, None)
        assert not vouched or sync(engine, calls(3, order, size), lambda: rng.random() < 0.2) == 3
        engine.managed.begin()
        for call in calls(1, order, size):
            engine.load(call)
        engine.managed.finish()
        assert request(engine) == 1
        assert sync(engine, [POLICIES[2]]) == 2


def test_a_call_that_is_repeated_changes_nothing(atomic):
    """At any time: within a sync, with a request behind it, in the first sync, after the last call of one. U1, U2."""
    engine, order = toys.engine(atomic=atomic), range(len(POLICIES[0]))
    for policy in (1, 2, 3, 1, 2, 3):
        sent = calls(policy, order)
        for at, call in enumerate(sent):
            engine.load(call)
            if at == 6:
                engine.load(call)
            if at in (3, 6):
                assert request(engine) is None
        engine.load(sent[-1])
        assert request(engine) == policy
        engine.load(sent[-1])
        assert request(engine) == policy


def test_an_unnamed_update_that_is_not_whole_answers_nobody_and_says_how_to_name_it(atomic):
    """Under "model" the old policy answered without a word. U4."""
    engine = toys.engine(atomic=atomic)
    engine.load(POLICIES[1][:-1])
    assert request(engine) is None and "lm_head.weight did not come" in engine.managed.policy().why_refused()
    assert sync(engine, [POLICIES[2]]) == 2


def test_a_session_that_is_whole_and_not_ended_is_told(atomic, caplog):
    """A sender died in it, and another sent a whole policy since. U4."""
    engine = toys.engine(atomic=atomic)
    engine.managed.begin()
    engine.load(POLICIES[1][:4])
    assert request(engine) == (0 if atomic == "model" else None)
    engine.load(POLICIES[2])
    caplog.set_level(logging.WARNING, logger="flashpatch.fp8")
    for _ in range(2):
        assert request(engine) == (0 if atomic == "model" else None)
    said = [record.message for record in caplog.records if "has not ended it" in record.message]
    assert len(said) == (atomic == "model")
    engine.managed.finish()
    assert request(engine) == 2


def test_buffers_that_have_come_once_belong_to_every_update(atomic):
    """After dummy weights; parameters in a call, buffers in the next one, a request between them. U3."""
    engine = toys.engine(seed=None, atomic=atomic)
    for policy in (1, 2, 3):
        buffers = [item for item in POLICIES[policy] if item[0].endswith(".bias")]
        engine.load([item for item in POLICIES[policy] if not item[0].endswith(".bias")])
        engine.managed.after_call()
        assert request(engine) is None and "norm.bias" in engine.managed.policy().why_refused()
        engine.load(buffers)
        assert request(engine) == policy


def test_a_sender_that_names_its_ends_may_change_its_order(atomic):
    """Also if a request comes between its last call and its end. U6."""
    engine, rng, order = toys.engine(atomic=atomic), random.Random(0), list(range(len(POLICIES[0])))
    for policy in (1, 2, 3, 1):
        rng.shuffle(order)
        for call in calls(policy, order):
            engine.load(call)
        if policy != 2:
            assert request(engine) == policy
        engine.managed.finish()
        assert request(engine) == policy


def test_what_layers_share_is_kept_by_layer_when_an_update_begins_within_a_call(atomic):
    """Head and embedding, tied after the first load: what this call brought for one of them stays. U8."""
    weights = [dict(policy) | {"lm_head.weight": dict(policy)["embed.weight"]} for policy in POLICIES]

    def tie(model):
        toys.process_all(model)
        model.lm_head.weight = model.embed.weight

    def opened():
        return toys.Engine(toys.Model(), list(weights[0].items()), tie, atomic=atomic)

    name = "layers.0.norm.weight"
    engine = opened()
    engine.load([(name, weights[1][name])])
    first = ("lm_head.weight", name)
    other = dict(weights[2]) | {"embed.weight": weights[3]["embed.weight"]}
    with pytest.raises(PatchError, match="were given different values"):
        engine.load([(one, other[one]) for one in (*first, *(n for n in other if n not in first))])
    assert request_refused(engine) or atomic == "model"

    engine = opened()
    engine.load([("embed.weight", weights[1]["embed.weight"])])
    engine.load(
        [item for item in weights[2].items() if item[0] != "embed.weight"]
        + [("embed.weight", weights[2]["embed.weight"])]
    )
    engine.managed.before_request()
    assert engine.managed.may_generate
    assert toys.same_answers(engine.model, toys.fresh("transposed", list(weights[2].items())))


def request_refused(engine):
    engine.managed.before_request()
    return not engine.managed.may_generate


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


def steps(boundaries, call, *items):
    return [boundaries.arrive(name, call, value) for name, value in items]


def test_the_anchor_always_begins_anew():
    take, anew, skip = Step.TAKE, Step.ANEW, Step.SKIP
    names = Boundaries()
    names.begin(named=False)
    assert steps(names, 1, ("a", 1)) + steps(names, 2, ("b", 1)) == [take, take]
    assert steps(names, 3, ("b", 1)) == [skip] and not names.doubt
    assert steps(names, 4, ("a", 2), ("b", 2)) == [anew, take] and names.came == {"a": 4, "b": 4}
    assert steps(names, 5, ("c", 2)) == [take] and not names.doubt
    names.commit(by_name=False)
    names.begin(named=False)
    assert (
        steps(names, 1, ("b", 3)) == [take]
        and "b came first, where earlier updates began with a" in names.doubt
    )


def test_nothing_is_learned_from_an_update_with_an_end():
    names = Boundaries()
    for call, order in enumerate(("abc", "cab", "bca")):
        names.begin(named=False)
        for place, name in enumerate(order):
            assert names.arrive(name, 3 * call + place, call) is Step.TAKE
        assert not names.doubt
        names.commit(by_name=True)
