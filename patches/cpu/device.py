"""Implement verl's platform interface for the CPU. Needs verl.

Sources: ``verl/plugin/platform/platform_base.py`` (the interface) and the callers of
``verl.utils.device.get_torch_device``, which use the names below on ``torch.cuda``."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from flashpatch import engine

PLATFORM = "cpu.verl.register_platform"


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing, as there is nothing to do without a device."""


class Ordinal(str):
    """Give the current device if verl uses one value both as a tensor's device and as an index.

    ``tensor.to(Ordinal("cpu"))`` is on the CPU, and ``f"cpu:{Ordinal('cpu')}"`` is ``"cpu:0"``, the same
    device; a plain 0 would be the first CUDA device, a plain "cpu" would give "cpu:cpu"."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)

    def __index__(self) -> int:
        return 0


class CPUModule(ModuleType):
    """``torch.cpu``, and what verl asks of ``torch.cuda`` besides: memory, names, random numbers.

    Memory is that of the process, in bytes; there is no separate device memory to empty or to collect."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def memory_allocated(self, device: Any = None) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def max_memory_allocated(self, device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    reset_peak_memory_stats = empty_cache = ipc_collect = _nothing

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class PlatformCPU(PlatformBase):
    """Describe a machine without an accelerator. One of Ray's "GPU"s is one training rank, as elsewhere."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CPUModule("flashpatch.patches.cpu.device.module")

    def __init__(self) -> None:
        engine.record_call(PLATFORM)

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Ordinal:
        return Ordinal("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource "GPU"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # verl then sends weights through shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        """Rollout engines share the cores with the trainer and each other, so none is bound to its own; Ray
        would give each a single thread."""
        wanted = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        return {name: os.environ.get(name, value) for name, value in wanted.items()}
