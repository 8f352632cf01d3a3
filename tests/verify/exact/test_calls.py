"""What a norm is given: its values, or their sum with the residual that it adds them to; and what is compared of a module that an
engine gives ids where the trainer's model gives a mask (OPT's positions)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.compare import _place
from flashpatch.verify.exact.forced import Gap, Part, gaps


class FusedNorm(torch.nn.Module):
    """Adds, as most engines' do."""

    def forward(self, x, residual):
        residual += x
        return residual / 2, residual


class CarryingNorm(torch.nn.Module):
    """Hands the residual on, as Cohere's does."""

    def forward(self, x, residual):
        return x / 2, residual


@pytest.mark.parametrize(("kind", "factor"), [(FusedNorm, 4), (CarryingNorm, 1)])
def test_a_residual_counts_where_it_is_added(kind: type, factor: int) -> None:
    model, x = torch.nn.Sequential(kind()), torch.arange(1.0, 7.0).reshape(3, 2)
    with recorded(model) as calls:
        model[0](x.clone(), 3 * x)
    assert torch.equal(calls[0].given, factor * x)


def test_nothing_added_is_a_sum_too() -> None:
    model, residual = torch.nn.Sequential(FusedNorm()), torch.ones(3, 2)
    with recorded(model) as calls:
        model[0](torch.zeros(3, 2), residual.clone())
    assert torch.equal(calls[0].given, residual)


class Positions(torch.nn.Module):
    def forward(self, mask: Any) -> Any:
        return mask.cumsum(-1)[0][:, None].repeat(1, 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.weight = Positions(), torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.positions(torch.ones(input_ids.shape))[None])


WANTED = torch.arange(1.0, 5.0)[:, None].repeat(1, 2)


def test_a_rank_that_is_wrong_in_decode_steps_alone_is_named() -> None:
    wrong = WANTED * torch.tensor([[1, 1], [1, 1], [1, 1], [1, 2]])
    engine = [Call("positions", torch.arange(4), wrong, returned_by=torch.tensor([0, 1]))]
    found, _ = gaps(Model(), [5, 6, 7, 8], engine, WANTED[:-1], Part(steps=2))
    place = _place(found, {"positions": Gap("positions")}, False, None)
    assert place.differs and str(place) == "positions, rank 1, in decode steps"


def test_ids_are_not_compared_with_a_mask() -> None:
    engine = [Call("positions", torch.arange(4), WANTED)]
    found = gaps(Model(), [5, 6, 7, 8], engine, WANTED[:-1])
    assert [(gap.place, gap.size) for gap in found] == [("positions", 0.0), ("logits", 0.0)]
