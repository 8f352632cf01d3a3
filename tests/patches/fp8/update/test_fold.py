"""Live state made equal to fresh state in place."""

import functools
import gc
from collections import namedtuple

import pytest
import torch

from flashpatch.patches.fp8.update.process import LayoutChanged, Plan


class Kernel:
    def __init__(self, weight, scale=1.0):
        self.weight = weight
        self.scale = scale

    def run(self, x):
        return x @ self.weight * self.scale

    def walk(self, x):
        return x


class Handle(Kernel):
    """Owns ``number``; each must be released once."""

    released: list[int] = []

    def __init__(self, number, weight=None):
        super().__init__(weight)
        self.number = number

    def __del__(self):
        Handle.released.append(self.number)


def closure(weight, scale):
    return lambda x, bias=weight.sum(), *, more=weight: (x @ weight) * scale + bias + more.sum()


Pair = namedtuple("Pair", "weight scale")
A, B = torch.arange(4.0).view(2, 2), torch.arange(4.0, 8.0).view(2, 2)


def make(weight):
    """One of each holder of ``weight``, and the tensors inside, which must keep their place."""
    w = [weight.clone() for _ in range(8)]
    holders = {
        "tensor": w[0],
        "list": [w[1], float(weight.sum())],
        "dict": {"deep": {"er": w[2]}, "n": 3},
        "kernel": Kernel(w[3], float(weight.sum())),
        "closure": closure(w[4], float(weight.sum())),
        "tuple": (w[5], float(weight.sum()), "name"),
        "named": Pair(w[6], float(weight.sum())),
        "partial": functools.partial(torch.add, w[7], alpha=float(weight.sum())),
    }
    return holders, w


def apply(live, fresh, where="here"):
    plan = Plan()
    kept = plan.pair(live, fresh, where)
    return plan, kept


@pytest.mark.parametrize("name", list(make(A)[0]))
def test_values_change_in_place_and_only_on_apply(name):
    (live, tensors), (fresh, _) = make(A), make(B)
    plan, kept = apply(live[name], fresh[name])
    assert all(torch.equal(t, A) for t in tensors)
    plan.apply()
    assert sum(torch.equal(t, B) for t in tensors) == 1
    got = flat(kept)
    if name != "closure":
        assert any(g is t for g in got for t in tensors), "the tensor in use has been replaced"
    for a, b in zip(got, flat(fresh[name]), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert type(kept) is type(live[name])
    if name not in ("tuple", "named", "partial"):
        assert kept is live[name]


def flat(value):
    """The tensors and numbers somewhere inside ``value``."""
    if isinstance(value, (torch.Tensor, int, float, str)):
        return [value]
    if isinstance(value, functools.partial):
        return flat([*value.args, *value.keywords.values()])
    if isinstance(value, Kernel):
        return flat(vars(value))
    if isinstance(value, dict):
        return flat(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value(torch.eye(2))]


def test_another_method_is_taken():
    live, fresh = Kernel(A.clone()), Kernel(B.clone())
    plan, kept = apply(live.run, fresh.walk)
    plan.apply()
    assert kept.__func__ is Kernel.walk
    plan, kept = apply(live.run, fresh.run)
    plan.apply()
    assert kept.__self__ is live and torch.equal(live.weight, B)


@pytest.mark.parametrize(
    "fresh",
    [torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2, device="meta")],
    ids=["shape", "dtype", "device"],
)
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: {"k": (t, 1)}, Kernel])
def test_another_layout_is_refused_before_anything_changes(wrap, fresh):
    live = A.clone()
    plan = Plan()
    plan.pair(torch.zeros(2), torch.ones(2), "fine")
    with pytest.raises(LayoutChanged, match="the engine runs on"):
        plan.pair(wrap(live), wrap(fresh), "layer.weight")
    assert torch.equal(live, A)


def test_lists_of_tensors_of_another_length_are_refused():
    with pytest.raises(LayoutChanged):
        apply([A.clone()], [B.clone(), B.clone()])
    with pytest.raises(LayoutChanged):
        apply((A.clone(), 1), (B.clone(), B.clone(), 1))


def test_one_tensor_cannot_take_two_values():
    live = A.clone()
    plan = Plan()
    plan.pair(live, B.clone(), "here")
    plan.pair(live, B.clone(), "the same values are fine")
    with pytest.raises(LayoutChanged, match="there and .* share one tensor"):
        plan.pair(live, B + 1, "there")


def test_expanded_tensors():
    """The part of one that is copied must not be taken for another's, whose place in memory it gets once it is gone."""
    for values in ([3.0] * 8, range(8)):
        live = [torch.ones(1).expand(4) for _ in values]
        plan, kept = apply(live, [torch.full((1,), float(value)).expand(4) for value in values])
        plan.apply()
        assert kept is live and [one.tolist() for one in live] == [[float(value)] * 4 for value in values]
    with pytest.raises(LayoutChanged):
        apply(live[0], torch.arange(4.0))


def test_another_kind_of_object_replaces_the_old_one():
    for live, fresh in ((1, 2), ("a", "b"), ([1], (1,)), (None, Kernel(1)), (closure(A, 1), lambda x: x)):
        assert apply(live, fresh)[1] is fresh


def test_cycles_end():
    live, fresh = Kernel(A.clone()), Kernel(B.clone())
    live.back, fresh.back = [live], [fresh]
    plan, kept = apply(live, fresh)
    plan.apply()
    assert kept is live and live.back[0] is live and torch.equal(live.weight, B)


def test_a_handle_is_released_without_the_garbage_collector():
    Handle.released.clear()
    holder = {"handle": Handle(0, A.clone())}
    gc.disable()
    try:
        plan, _ = apply(holder, {"handle": Handle(1, B.clone())})
        plan.apply()
        del plan, _
        assert Handle.released == [0]
    finally:
        gc.enable()


def test_each_handle_is_released_once():
    Handle.released.clear()
    holder = {"handle": Handle(0, A.clone())}
    live, weight = holder["handle"], holder["handle"].weight
    for number in range(1, 6):
        plan, kept = apply(holder, {"handle": Handle(number, B.clone())})
        assert plan.owns_resources
        plan.apply()
        del plan, kept
        gc.collect()
        assert Handle.released == list(range(number))
        assert holder["handle"] is live and live.number == number and live.weight is weight
    assert torch.equal(weight, B)
    holder.clear()
    del live
    gc.collect()
    assert sorted(Handle.released) == list(range(6))


def test_a_plan_that_is_not_carried_out_releases_what_is_fresh():
    Handle.released.clear()
    live = Handle(0)
    plan, kept = apply(live, Handle(1))
    del plan, kept
    gc.collect()
    assert Handle.released == [1] and live.number == 0
