"""What is compared of a module that an engine gives ids where the trainer's model gives a mask (OPT's positions)."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashpatch.verify.exact.calls import Call  # noqa: E402  needs torch
from flashpatch.verify.exact.forced import gaps  # noqa: E402


class Positions(torch.nn.Module):
    def forward(self, mask: Any) -> Any:
        return mask.cumsum(-1)[0][:, None]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.weight = Positions(), torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.positions(torch.ones(input_ids.shape))[None])


def test_ids_are_not_compared_with_a_mask() -> None:
    wanted = torch.arange(1.0, 5.0)[:, None]
    engine = [Call("positions", torch.arange(4), wanted)]
    found = gaps(Model(), [5, 6, 7, 8], engine, wanted[:-1])
    assert [(gap.place, gap.size) for gap in found] == [("positions", 0.0), ("logits", 0.0)]
