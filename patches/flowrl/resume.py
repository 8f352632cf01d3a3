"""Resume from a checkpoint without FlowRL: load the policy, start a new partition function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashpatch.patches._shared.flow_names import is_head
from flashpatch.patches.flowrl.export import MANAGER
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.flowrl")


def on_load(original, self, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
    """Add what the checkpoint lacks while ``FSDPCheckpointManager.load_checkpoint`` loads it."""
    if local_path is None or self.model is None or not any(is_head(name) for name in _names(self.model)):
        return original(self, local_path, *args, **kwargs)

    def weights(state: Mapping[str, Any]) -> Mapping[str, Any]:
        if any(map(is_head, state)):
            return state
        logger.warning(
            "%s was written without FlowRL: the partition function starts from its initial weights",
            local_path,
        )
        return {**state, **{name: own for name, own in self.model.state_dict().items() if is_head(name)}}

    with (
        _filling(self.model, weights),
        _filling(self.optimizer, lambda state: with_group(state, self.optimizer.state_dict())),
        _filling(self.lr_scheduler, lambda state: with_rate(state, self.lr_scheduler.state_dict())),
    ):
        return original(self, local_path, *args, **kwargs)


def with_group(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the second parameter group to a saved optimizer state that has only the first.

    The second group's learning rate joins at the stage where the first one's is.
    """
    groups, own = saved.get("param_groups"), fresh.get("param_groups")
    if groups is None or own is None or len(groups) != 1 or len(own) != 2:
        return saved
    first = len(groups[0]["params"])
    added = {**own[1], "params": [first + at for at in range(len(own[1]["params"]))]}
    if groups[0].get("initial_lr"):
        added["lr"] = own[1]["initial_lr"] * groups[0]["lr"] / groups[0]["initial_lr"]
    return {**saved, "param_groups": [*groups, added]}


def with_rate(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the second group's learning rate to a saved schedule that has only the first's.

    The second group joins at the stage where the first one is.
    """
    one, both = saved.get("base_lrs"), fresh.get("base_lrs")
    if one is None or both is None or len(one) != 1 or len(both) != 2:
        return saved
    stage = saved["_last_lr"][0] / one[0] if one[0] else 1.0
    return {
        **saved,
        "base_lrs": [*one, both[1]],
        "_last_lr": [*saved["_last_lr"], both[1] * stage],
        "lr_lambdas": [*saved["lr_lambdas"], fresh["lr_lambdas"][1]],
    }


@contextmanager
def _filling(holder: Any, fill: Callable[[Any], Any]) -> Iterator[None]:
    """Pass the state through ``fill`` before ``holder.load_state_dict`` inside the block."""
    if holder is None:
        yield
        return
    load = holder.load_state_dict
    holder.load_state_dict = lambda state, *args, **kwargs: load(fill(state), *args, **kwargs)
    try:
        yield
    finally:
        del holder.load_state_dict


def _names(model: Any) -> Iterator[str]:
    return (name for name, _ in model.named_modules())


PATCH = Patch(
    id="flowrl.verl.load_checkpoint",
    targets=(f"{MANAGER}:FSDPCheckpointManager.load_checkpoint",),
    wrapper=on_load,
    contract=Contract(
        params=("local_path",),
        mentions=(
            "self.model.load_state_dict",
            "self.optimizer.load_state_dict",
            "self.lr_scheduler.load_state_dict",
        ),
    ),
    evidence="optional",
    scope=frozenset({"trainer"}),
    requires="verl>=0.9",
    why="A checkpoint written without FlowRL lacks the partition function; verl fails with missing keys.",
    how="Adds the initial partition function, its optimizer group and its learning rate, and logs that; a "
    "checkpoint that has them is loaded unchanged.",
    remove_when="verl has a partition function of its own.",
)
