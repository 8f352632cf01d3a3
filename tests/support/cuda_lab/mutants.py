"""Faults planted into an update, each of which named cases must show: how sharp the comparison is.

Each changes `fold.Plan`, which brings what a layer's processing has made anew into the tensors that the engine runs on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def use(name: str) -> None:
    """Plant the mutant of this name; "" plants none. Raises KeyError for an unknown one."""
    if name:
        MUTANTS[name]()


def _forgotten(is_forgotten: Callable[[torch.Tensor, str], bool]) -> None:
    """Leave a tensor of the engine as it was if ``is_forgotten(tensor, path)`` holds."""
    from flashpatch.patches.fp8.refit.fold import Plan

    real = Plan._tensor

    def pair(self, live, fresh, where):
        return live if is_forgotten(live, where) else real(self, live, fresh, where)

    Plan._tensor = pair


def scales_not_copied() -> None:
    _forgotten(lambda tensor, where: "scale" in where)


def derived_not_copied() -> None:
    """MLA's projections, which attention derives from those of its neighbour."""
    _forgotten(lambda tensor, where: where.endswith(("W_UK_T", "W_UV")))


def attributes_not_assigned() -> None:
    from flashpatch.patches.fp8.refit.fold import Plan

    real = Plan.assign

    def assign(self, state, key, value):
        if not isinstance(value, float):
            real(self, state, key, value)

    Plan.assign = assign


def one_expert_skipped() -> None:
    from flashpatch.patches.fp8.refit.fold import Plan

    real = Plan._tensor

    def pair(self, live, fresh, where):
        is_of_experts = live.dim() == 3 and live.shape == fresh.shape
        real(self, *((live[1:], fresh[1:]) if is_of_experts else (live, fresh)), where)
        return live

    Plan._tensor = pair


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (scales_not_copied, derived_not_copied, attributes_not_assigned, one_expert_skipped)
}
CAUGHT_BY = {
    "scales_not_copied": "fp8",
    "derived_not_copied": "mla_fp8",
    "attributes_not_assigned": "static_kv",
    "one_expert_skipped": "moe_fp8",
}
"""By mutant, the case that must show it."""
