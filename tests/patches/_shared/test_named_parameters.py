"""A module's parameters, listed in one walk: what torch lists, at any moment."""

import itertools

from torch import nn

from flashpatch.patches._shared.named_parameters import NamedParameters


class Renaming(nn.Module):
    """Walks in a way of its own."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield f"{prefix}.own", nn.Linear(2, 2)


def same(model: nn.Module) -> bool:
    ours = NamedParameters(model)
    for prefix, recurse, once in itertools.product(("", "top"), (True, False), (True, False)):
        stock = nn.Module.named_parameters(model, prefix, recurse, once)
        found = ours(prefix, recurse=recurse, remove_duplicate=once)
        if [(key, id(one)) for key, one in found] != [(key, id(one)) for key, one in stock]:
            return False
    return True


def test_lists_what_torch_lists_at_that_moment_whatever_is_shared_or_missing() -> None:
    model = nn.ModuleDict({"b": nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "a": nn.Linear(3, 3)})
    model["again"], model["tied"] = model["b"][0], nn.Linear(3, 3, bias=False)
    model["tied"].weight = model["a"].weight
    model["b"].register_module("gone", None)
    assert len(list(NamedParameters(model)())) == 6 and same(model)
    model["a"].weight = nn.Parameter(model["a"].weight.detach() + 1)
    assert len(list(NamedParameters(model)())) == 7 and same(model)


def test_a_module_that_walks_in_its_own_way_is_asked() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "own": Renaming()})
    assert "own.own.weight" in dict(NamedParameters(model)())
