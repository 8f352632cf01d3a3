"""What a trainer's side of a sync takes on its device: the audit's fingerprint of a tensor, and the differences of two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from felting import counting

VALUES = 1 << 26  # of bf16: 128 MiB


def measured(_folder: Path) -> dict[str, dict[str, Any]]:
    """Return by what is done its launches, waits, and passes over the tensor, and its peak over the tensor's size."""
    from flashpatch.patches._shared import fingerprint
    from flashpatch.patches.fp8.delta import changes

    old = torch.randn(1 << 20).repeat(VALUES >> 20).bfloat16().cuda()
    found = {"audit": _counted(old, lambda: fingerprint.of(old))}
    for share in (0.01, 1.0):
        new = old.clone()
        new[: int(share * VALUES)].neg_()
        pair = changes.bits(old), changes.bits(new)
        found[f"delta, {share:.0%} changed"] = _counted(old, lambda pair=pair: changes.encode(*pair))
    return found


def _counted(tensor: torch.Tensor, work: Callable[[], Any]) -> dict[str, Any]:
    work()  # what is made once
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with counting.launches() as seen:
        work()
    return dict(
        launches=seen.seen.total(),
        waits=seen.waits.total(),
        passes=seen.touched / tensor.nbytes,
        peak=(torch.cuda.max_memory_allocated() - before) / tensor.nbytes,
        wall=counting.milliseconds(work),
    )
