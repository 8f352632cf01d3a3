"""Initialize the process group with one gloo backend; verl names it twice."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from flashpatch import ledger
from flashpatch.record import Contract, Patch

DISTRIBUTED = "verl.utils.distributed"
BACKEND = "cpu:gloo"


def on_ray(original, timeout_second: int | None = None, backend: str | None = None) -> Any:
    """Pass one gloo backend to ``initialize_global_process_group_ray``, and note the role trainer.

    Processes that receive weights for separate rollouts name a backend; they train nothing.
    """
    if backend is None:
        _trainer()
    return original(timeout_second, backend or BACKEND)


def on_launcher(original, timeout_second: int = 36000) -> tuple[int, int, int]:
    """Replace ``initialize_global_process_group``, which takes no backend."""
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


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    scope=frozenset({"trainer"}),
    needs=("cpu.verl.register_platform",),
    why='verl asks torch for "cpu:gloo,<device>:<backend>", which for a CPU is "cpu:gloo,cpu:gloo"; torch '
    "refuses a device that is named twice.",
    remove_when="verl names each device once.",
)

RAY = _patch(
    id="cpu.verl.initialize_global_process_group_ray",
    targets=(f"{DISTRIBUTED}:initialize_global_process_group_ray",),
    wrapper=on_ray,
    contract=Contract(params=("timeout_second", "backend"), mentions=("get_nccl_backend",)),
    evidence="install",
    how='Passes "cpu:gloo" if no backend is given, and notes that the process is a trainer.',
)

LAUNCHER = _patch(
    id="cpu.verl.initialize_global_process_group",
    targets=(f"{DISTRIBUTED}:initialize_global_process_group",),
    wrapper=on_launcher,
    contract=Contract(params=("timeout_second",), mentions=("get_nccl_backend",)),
    evidence="optional",
    how='Initializes the same group with "cpu:gloo", for scripts started by torchrun.',
)
