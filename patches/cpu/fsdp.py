"""Run torch's FSDP with the CPU as the device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from flashpatch.record import Contract, Patch

INIT = "torch.distributed.fsdp._init_utils"
PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


def on_check(original, module_states: list[Any]) -> None:
    """Skip the check: without an accelerator there is no device to move the states to."""
    return None


def on_param(original, self, *args: Any, **kwargs: Any) -> None:
    """Replace the offload policy by one without pinned memory in ``FSDPParam.__init__``."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    def unpinned(value: Any) -> Any:
        pinned = isinstance(value, CPUOffloadPolicy) and value.pin_memory
        return replace(value, pin_memory=False) if pinned else value

    args, kwargs = tuple(map(unpinned, args)), {name: unpinned(value) for name, value in kwargs.items()}
    return original(self, *args, **kwargs)


def on_core_state(
    original,
    state: Any,
    sharding_strategy: Any,
    mixed_precision: Any,
    cpu_offload: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Drop the offload to the CPU in ``_init_core_state``: the parameters are there already."""
    return original(state, sharding_strategy, mixed_precision, None, *args, **kwargs)


_patch = functools.partial(
    Patch,
    requires="torch>=2.6",
    evidence="optional",
    scope=frozenset({"trainer"}),
    needs=("cpu.verl.register_platform",),
)

SYNC = _patch(
    id="cpu.torch.check_module_states_for_sync_module_states",
    targets=(f"{INIT}:_check_module_states_for_sync_module_states",),
    wrapper=on_check,
    contract=Contract(params=("module_states",), exists=(f"{INIT}:_sync_module_params_and_buffers",)),
    why="FSDP1 refuses sync_module_states=True, which verl always sets, while parameters are on the CPU, "
    "since NCCL could not broadcast them; gloo can.",
    how="Skips the check; torch does the broadcast.",
    remove_when="torch asks the process group whether it can broadcast CPU tensors.",
)

PIN = _patch(
    id="cpu.torch.fsdp_param_init",
    targets=(f"{PARAM}:FSDPParam.__init__",),
    wrapper=on_param,
    contract=Contract(
        params=("offload_policy",),
        mentions=("self.pin_memory",),
        exists=("torch.distributed.fsdp._fully_shard._fsdp_api:CPUOffloadPolicy.pin_memory",),
    ),
    why="Under FSDP2 verl offloads the reference policy with pinned memory, which torch can only pin for an "
    "accelerator.",
    how="Passes the same policy with pin_memory=False.",
    remove_when="verl pins memory only if there is a device to copy it to.",
)

OFFLOAD = _patch(
    id="cpu.torch.init_core_state",
    targets=(f"{INIT}:_init_core_state",),
    wrapper=on_core_state,
    contract=Contract(
        params=("state", "sharding_strategy", "mixed_precision", "cpu_offload"),
        mentions=("state.cpu_offload",),
    ),
    why="Under FSDP1 verl offloads the reference policy to the CPU, for which torch pins memory; it can only "
    "for an accelerator.",
    how="Skips the offload: the parameters are on the CPU already.",
    remove_when="torch pins memory only if there is a device to copy it to.",
)
