"""Train with verl on the CPU: gloo alone, FSDP without a device, and the trainer mode ``separate_async``."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.patches._shared import gathered

DISTRIBUTED = "verl.utils.distributed"
INIT = "torch.distributed.fsdp._init_utils"
PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
BACKEND = "cpu:gloo"
_WHY = (
    'verl asks torch for "cpu:gloo,<device>:<backend>", which for a CPU is "cpu:gloo,cpu:gloo"; torch '
    "refuses a device that is named twice."
)

patches = Patches("cpu", "verl>=0.9", scope="trainer", evidence="optional")


@patches.wrap(
    f"{DISTRIBUTED}:initialize_global_process_group_ray",
    relies_on="get_nccl_backend",
    evidence="install",
    why=_WHY,
    remove_when="verl names each device once.",
)
def initialize_global_process_group_ray(
    original, timeout_second: int | None = None, backend: str | None = None
) -> Any:
    """Pass "cpu:gloo" if no backend is given, and note that the process is a trainer.

    Processes that receive weights for separate rollouts name a backend; they train nothing."""
    if backend is None:
        _trainer()
    return original(timeout_second, backend or BACKEND)


@patches.wrap(
    f"{DISTRIBUTED}:initialize_global_process_group",
    relies_on="get_nccl_backend",
    why=_WHY,
    remove_when="verl names each device once.",
)
def initialize_global_process_group(original, timeout_second: int = 36000) -> tuple[int, int, int]:
    """Initialize the same group with "cpu:gloo", for scripts started by torchrun."""
    import torch

    _trainer()
    torch.distributed.init_process_group(
        backend=BACKEND,
        timeout=timedelta(seconds=timeout_second),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
    return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _trainer() -> None:
    ledger.role("trainer", rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)))


class _WithoutFlush(logging.LoggerAdapter):
    """Accept print's keyword ``flush`` in the methods of a logger, and leave it out."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("flush", None)
        return msg, kwargs


@patches.wrap(
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._setup",
    relies_on=("logger.info", "self._enable_hybrid_replicas", "self.standalone_checkpoint_manager"),
    scope="driver",
    why="With actor_rollout_ref.hybrid_engine=False, which leaves rollouts out of the trainer's processes, the trainer "
    "ends in a TypeError: it logs with print's keyword flush.",
    remove_when="verl logs this line without flush.",
)
def separate_async_setup(original, self) -> None:
    """Give the module, while it sets up, a logger that takes the keyword and leaves it out."""
    names = original.__globals__
    logger = names["logger"]
    names["logger"] = _WithoutFlush(logger, {})
    try:
        return original(self)
    finally:
        names["logger"] = logger


gathered.before_exchange(patches)

torch_patches = Patches(
    "cpu", "torch>=2.6", scope="trainer", evidence="optional", needs="cpu.verl.register_platform"
)


@torch_patches.wrap(
    f"{INIT}:_check_module_states_for_sync_module_states",
    relies_on=f"{INIT}:_sync_module_params_and_buffers",
    why="FSDP1 refuses sync_module_states=True, which verl always sets, while parameters are on the CPU, "
    "since NCCL could not broadcast them; gloo can.",
    remove_when="torch asks the process group whether it can broadcast CPU tensors.",
)
def check_module_states_for_sync_module_states(original, module_states: list[Any]) -> None:
    """Skip the check; torch does the broadcast."""


@torch_patches.wrap(
    f"{PARAM}:FSDPParam.__init__",
    params="offload_policy",
    relies_on=(
        "self.pin_memory",
        "torch.distributed.fsdp._fully_shard._fsdp_api:CPUOffloadPolicy.pin_memory",
    ),
    why="Under FSDP2 verl offloads the reference policy with pinned memory, which torch can only pin for an "
    "accelerator.",
    remove_when="verl pins memory only if there is a device to copy it to.",
)
def fsdp_param_init(original, self, *args: Any, **kwargs: Any) -> None:
    """Pass the same policy with pin_memory=False."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    def unpinned(value: Any) -> Any:
        pinned = isinstance(value, CPUOffloadPolicy) and value.pin_memory
        return replace(value, pin_memory=False) if pinned else value

    return original(self, *map(unpinned, args), **{name: unpinned(value) for name, value in kwargs.items()})


@torch_patches.wrap(
    f"{INIT}:_init_core_state",
    relies_on="state.cpu_offload",
    why="Under FSDP1 verl offloads the reference policy to the CPU, for which torch pins memory; it can only "
    "for an accelerator.",
    remove_when="torch pins memory only if there is a device to copy it to.",
)
def init_core_state(
    original,
    state: Any,
    sharding_strategy: Any,
    mixed_precision: Any,
    cpu_offload: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Skip the offload: the parameters are on the CPU already."""
    return original(state, sharding_strategy, mixed_precision, None, *args, **kwargs)
