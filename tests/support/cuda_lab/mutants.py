"""Faults planted into an update, each of which named cases must show: how sharp the comparison is.

Most change `fold.Plan`, which brings what a layer's processing has made anew into the tensors that the engine runs on;
two change what is kept while an engine sleeps."""

from collections.abc import Callable

import torch


def use(name: str) -> None:
    """Plant the mutant of this name; "" plants none. Raises KeyError for an unknown one."""
    if name:
        MUTANTS[name]()


def _forgotten(is_forgotten: Callable[[torch.Tensor, str], bool]) -> None:
    """Leave a tensor of the engine as it was if ``is_forgotten(tensor, path)`` holds."""
    from flashpatch.patches.fp8.update.process import Plan

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
    from flashpatch.patches.fp8.update.process import Plan

    real = Plan.assign

    def assign(self, state, key, value):
        if not isinstance(value, float):
            real(self, state, key, value)

    Plan.assign = assign


def one_expert_skipped() -> None:
    from flashpatch.patches.fp8.update.process import Plan

    real = Plan._tensor

    def pair(self, live, fresh, where):
        is_of_experts = live.dim() == 3 and live.shape == fresh.shape
        real(self, *((live[1:], fresh[1:]) if is_of_experts else (live, fresh)), where)
        return live

    Plan._tensor = pair


def processed_before_the_layers_they_read() -> None:
    """Layers that vLLM processes last, MLA's attention among them, look at neighbours that hold the old values."""
    from flashpatch.patches.fp8.update.process import Plan
    from flashpatch.patches.fp8.update.update import Update

    commit, apply = Update.commit, Plan.apply

    def late(self, missing, derive, by_name):
        waiting = {id(plan): plan for layer in self._layers if (plan := layer.came.plan) is not None}

        def after(undo):
            for plan in waiting.values():
                apply(plan, undo)
            derive(undo)

        Plan.apply = lambda plan, undo: None if id(plan) in waiting else apply(plan, undo)
        commit(self, missing, after, by_name)

    Update.commit = late


def initial_values_on_the_device() -> None:
    """Small tensors as the constructor made them are kept in memory that sleep level 2 takes away."""
    from flashpatch.patches.fp8.update.tensors import PristineParam

    real = PristineParam.__post_init__

    def on_the_device(self):
        real(self)
        if self.initial is not None:
            self.initial = self.initial.to(self.storage.device)

    PristineParam.__post_init__ = on_the_device


def plain_tensors_lost() -> None:
    """What modules hold beside parameters and buffers is not copied to the host before sleep level 2."""
    from flashpatch.patches.fp8.update.model import ManagedModel

    ManagedModel.constants = lambda self: []


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        scales_not_copied,
        derived_not_copied,
        attributes_not_assigned,
        one_expert_skipped,
        processed_before_the_layers_they_read,
        initial_values_on_the_device,
        plain_tensors_lost,
    )
}
CAUGHT_BY = {
    "processed_before_the_layers_they_read": "mla_fp8",
    "scales_not_copied": "fp8",
    "derived_not_copied": "mla_fp8",
    "attributes_not_assigned": "static_kv",
    "one_expert_skipped": "moe_fp8",
}
"""By mutant, the storage case that must show it."""
CAUGHT_AFTER_SLEEP = {"initial_values_on_the_device": "block_kv", "plain_tensors_lost": "alibi"}
"""By mutant, the case whose engine must show it after sleep level 2."""
ATOMIC = {"processed_before_the_layers_they_read": "model"}
"""By mutant, the mode in which it is a fault; of others `layer`."""
