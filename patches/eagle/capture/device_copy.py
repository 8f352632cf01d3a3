"""Copy the rows of an engine's step to the host without making the engine wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.patches.eagle.capture.host_buffers import Request, Rows

_MAX_PINNED = 1 << 30  # bytes of the pinned buffers for steps that are being copied from an accelerator


@dataclass
class Step:
    """Hold the rows of a step that are on the host, or will be.

    Attributes:
        spans: (request, first row, row behind the last) of each captured request.
        version: of the policy that computed the rows.
        wait: blocks until the rows are on the host; None if they are.
        release: frees the memory of the rows; None if nothing is to be freed.
    """

    rows: Rows
    spans: list[tuple[Request, int, int]]
    version: int
    wait: Callable[[], None] | None = None
    release: Callable[[], None] | None = None


class DeviceCopy:
    """Copy rows to the host.

    On a CPU nothing is copied but the small inputs, which the engine overwrites. From an accelerator rows are
    cloned on the engine's stream, which is quick, and copied on a stream of their own into pinned memory that
    is used again.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pinned: list[dict[str, torch.Tensor]] = []
        self._allocated = 0

    def copy_rows(
        self,
        spans: list[tuple[Request, int, int]],
        total: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        auxiliary: Sequence[torch.Tensor] | None,
        version: int,
    ) -> Step:
        """Start to copy the first ``total`` rows of a step; tensors as in `Recorder.step`.

        Raises:
            RuntimeError: too many copies from an accelerator are under way.
        """
        if hidden.device.type == "cpu":
            wide = torch.cat([layer[:total] for layer in auxiliary], dim=-1) if auxiliary else None
            rows = Rows(ids[:total].clone(), positions[:total].clone(), hidden[:total], wide)
            return Step(rows, spans, version)
        return self._from_device(spans, ids, positions, hidden, auxiliary, version)

    def _from_device(self, spans, ids, positions, hidden, auxiliary, version) -> Step:
        first, behind = spans[0][1], spans[-1][2]  # the chosen requests lie within these rows
        spans = [(request, start - first, end - first) for request, start, end in spans]
        parts = {"ids": ids, "positions": positions, "hidden": hidden}
        total = behind - first
        clones = {name: tensor[first:behind].clone() for name, tensor in parts.items()}
        if auxiliary:
            clones["auxiliary"] = torch.cat([layer[first:behind] for layer in auxiliary], dim=-1)
        device = torch.get_device_module(hidden.device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())
        pinned = self._pinned_for(total, clones)
        with device.stream(self._stream):
            for name, clone in clones.items():
                pinned[name][:total].copy_(clone, non_blocking=True)
                clone.record_stream(self._stream)
            event = device.Event()
            event.record()
        wide = pinned["auxiliary"][:total] if auxiliary else None
        rows = Rows(pinned["ids"][:total], pinned["positions"][:total], pinned["hidden"][:total], wide)
        return Step(rows, spans, version, event.synchronize, lambda: self._pinned.append(pinned))

    def _pinned_for(self, total: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for index, pinned in enumerate(self._pinned):
            if pinned["ids"].shape[0] >= total and pinned.keys() == like.keys():
                return self._pinned.pop(index)
        size = max(64, 1 << (total - 1).bit_length())
        needed = sum(size * tensor[:1].nbytes for tensor in like.values())
        while (
            self._pinned and self._allocated + needed > _MAX_PINNED
        ):  # too small: a larger one takes its place
            self._allocated -= sum(tensor.nbytes for tensor in self._pinned.pop(0).values())
        if self._allocated and self._allocated + needed > _MAX_PINNED:
            raise RuntimeError("captured rows come faster than they can be stored")
        self._allocated += needed
        return {
            name: torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
            for name, tensor in like.items()
        }
