"""A module's parameters, listed in one walk: what torch lists, at any moment."""

import itertools

import torch
from torch import nn

from flashpatch.patches._shared.named_parameters import NamedParameters


class Renaming(nn.Module):
    """Walks in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield f"{prefix}.own", self.inner


def built() -> nn.Module:
    model = nn.ModuleDict({"b": nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "a": nn.Linear(3, 3)})
    model["again"] = model["b"][0]
    model["tied"] = nn.Linear(3, 3, bias=False)
    model["tied"].weight = model["a"].weight
    model["none"] = nn.ModuleDict()
    model["none"].register_module("gone", None)
    return model


def same(model: nn.Module) -> bool:
    ours = NamedParameters(model)
    for prefix, recurse, once in itertools.product(("", "top"), (True, False), (True, False)):
        stock = list(nn.Module.named_parameters(model, prefix, recurse, once))
        found = list(ours(prefix, recurse=recurse, remove_duplicate=once))
        if [key for key, _ in found] != [key for key, _ in stock]:
            return False
        if any(one is not other for (_, one), (_, other) in zip(found, stock)):
            return False
    return True


def test_lists_what_torch_lists_whatever_is_shared_or_missing() -> None:
    model = built()
    assert len(list(NamedParameters(model)())) == 6 and same(model)


def test_nothing_is_remembered() -> None:
    model = built()
    listed = NamedParameters(model)
    before = dict(listed())
    model["a"].weight = nn.Parameter(torch.ones(3, 3))
    model["new"] = nn.Linear(1, 1)
    after = dict(listed())
    assert after["a.weight"] is model["a"].weight is not before["a.weight"]
    assert after.keys() - before.keys() == {"tied.weight", "new.weight", "new.bias"} and same(model)


def test_a_module_that_walks_in_its_own_way_is_asked() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "own": Renaming()})
    assert "own.own.weight" in dict(NamedParameters(model)()) and same(model)
