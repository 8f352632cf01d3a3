"""What a drafter shares with the policy is the policy's: it need not come, is compared if it does, and is never written. D1 to D3."""

from contextlib import nullcontext

import fp8_toys as toys
import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import stated

SHARED = ("embed.weight", "lm_head.weight")


def engines(how: str, atomic: str) -> tuple[toys.Engine, toys.Engine]:
    """A policy, and a drafter that shares its embedding and head: ``how`` the tensors, or the modules."""
    target = toys.engine(seed=0, atomic=atomic)
    drafter = toys.engine(seed=5, atomic=atomic, role="drafter", lenders=lambda: [target.managed])
    for name in ("embed", "lm_head"):
        if how == "modules":
            setattr(drafter.model, name, getattr(target.model, name))
        else:
            getattr(drafter.model, name).weight = getattr(target.model, name).weight
    return target, drafter


def policy(own: int, shared: int) -> list:
    """The drafter's own tensors of one checkpoint, what it shares of another."""
    brought = {name: tensor for name, tensor in toys.checkpoint(shared) if name in SHARED}
    return [(name, brought.get(name, tensor)) for name, tensor in toys.checkpoint(own)]


def session(engine: toys.Engine, weights: list) -> None:
    engine.managed.begin()
    for one in weights:
        engine.load([one])
    engine.managed.finish()


def is_at(engine: toys.Engine, own: int, shared: int) -> bool:
    return toys.same_answers(engine.model, toys.fresh("transposed", policy(own, shared)))


@pytest.mark.parametrize("how", ["tensors", "modules"])
def test_what_a_drafter_shares_is_never_written(how, atomic):
    target, drafter = engines(how, atomic)
    assert is_at(target, 0, 0) and is_at(drafter, 5, 0)
    with pytest.raises(PatchError, match=r"embed\.weight.* other values than the policy"):
        session(drafter, policy(own=6, shared=6))
    assert is_at(target, 0, 0)
    session(drafter, policy(own=6, shared=0))
    assert drafter.managed.may_generate and is_at(drafter, 6, 0) and is_at(target, 0, 0)
    session(drafter, [one for one in policy(7, 7) if one[0] not in SHARED])
    assert drafter.managed.may_generate and is_at(drafter, 7, 0)


@pytest.mark.parametrize("how", ["tensors", "modules"])
def test_what_a_drafter_shares_may_come_twice_in_a_call(how, atomic):
    """DeepSeek's MTP block has an embedding of its own beside the model's, and vLLM's loader writes both into one."""
    target, drafter = engines(how, atomic)
    for last, end in (
        (6, pytest.raises(PatchError, match="other values than the policy")),
        (0, nullcontext()),
    ):
        again = [one for one in toys.checkpoint(last) if one[0] == SHARED[0]]
        with end, stated.update([drafter.managed]):
            drafter.load([*policy(own=6, shared=0), *again])
    assert drafter.managed.may_generate and is_at(drafter, 6, 0) and is_at(target, 0, 0)


@pytest.mark.parametrize("how", ["tensors", "modules"])
def test_one_sender_of_both(how, atomic):
    """The policy is committed first; what it brings is what the drafter's sender may bring too."""
    target, drafter = engines(how, atomic)
    for own, seed in ((6, 1), (7, 2)):
        for one in (target, drafter):
            one.managed.begin()
        target.load(toys.checkpoint(seed))
        drafter.load(policy(own, seed))
        for one in (target, drafter):
            one.managed.finish()
        assert target.managed.may_generate and drafter.managed.may_generate
        assert is_at(target, seed, seed) and is_at(drafter, own, seed)


@pytest.mark.parametrize("how", ["tensors", "modules"])
def test_a_sender_of_the_policy_alone_leaves_the_drafter_as_it_is(how, atomic):
    target, drafter = engines(how, atomic)
    for one in (target, drafter):
        one.managed.begin()
    target.load(toys.checkpoint(1))
    drafter.load([one for one in toys.checkpoint(1) if one[0] in SHARED])
    target.managed.finish()
    drafter.managed.finish()
    assert drafter.managed.may_generate and drafter.managed.version == 0
    assert is_at(target, 1, 1) and is_at(drafter, 5, 1)


@pytest.mark.parametrize("shared", SHARED)
def test_a_drafter_that_was_built_tied_and_given_one_of_the_two(shared, atomic):
    """Its own tensor and the policy's are one layer: the policy's was written, and its engine answered on by it."""
    target = toys.engine(seed=0, atomic=atomic)
    drafter = toys.engine(seed=5, tied=True, atomic=atomic, role="drafter", lenders=lambda: [target.managed])
    drafter.model.get_submodule(shared.rpartition(".")[0]).weight = target.model.get_parameter(shared)
    with pytest.raises(PatchError, match=f"{shared} came with other values than the policy"):
        session(drafter, toys.checkpoint(6, tied=True))
    assert is_at(target, 0, 0) and target.managed.may_generate
    equal = {"embed.weight": dict(toys.checkpoint(0))[shared]}
    session(drafter, [(name, equal.get(name, tensor)) for name, tensor in toys.checkpoint(7, tied=True)])
    assert is_at(target, 0, 0) and drafter.managed.may_generate
