"""Copy the rows of an engine's step to the host without making the engine wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.patches.eagle.capture.host_buffers import Request, Rows

# bytes of the pinned buffers for steps that are being copied, if two of the largest need no more
_MAX_PINNED = 1 << 30
_LARGE = 64 << 20  # bytes; a large buffer is of a multiple of them


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

    On a CPU nothing is copied but the small inputs, which the engine overwrites. From an accelerator all rows of a step are
    packed into one tensor on the engine's stream, which is quick, and copied on a stream of their own into pinned memory
    that is used again: two launches, and one more for auxiliary layers.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pinned: list[torch.Tensor] = []  # bytes
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
        parts = {
            "ids": ids[first:behind],
            "positions": positions[first:behind],
            "hidden": hidden[first:behind],
        }
        if auxiliary:
            parts["auxiliary"] = torch.cat([layer[first:behind] for layer in auxiliary], dim=-1)
        host = {name: part.clone() for name, part in parts.items() if part.device != hidden.device}
        # The widest numbers first, so that each part begins at a multiple of its own width.
        there = sorted((name for name in parts if name not in host), key=lambda name: -parts[name].itemsize)
        packed = torch.cat([parts[name].contiguous().view(-1).view(torch.uint8) for name in there])
        device = torch.get_device_module(hidden.device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())
        pinned = self._pinned_for(packed.numel())
        with device.stream(self._stream):
            pinned[: packed.numel()].copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)
            event = device.Event()
            event.record()
        at = 0
        for name in there:
            part = parts[name]
            host[name] = pinned[at : at + part.nbytes].view(part.dtype).view(part.shape)
            at += part.nbytes
        rows = Rows(host["ids"], host["positions"], host["hidden"], host.get("auxiliary"))
        return Step(rows, spans, version, event.synchronize, lambda: self._pinned.append(pinned))

    def _pinned_for(self, needed: int) -> torch.Tensor:
        for index, pinned in enumerate(self._pinned):
            if pinned.numel() >= needed:
                return self._pinned.pop(index)
        size = (
            max(1 << 16, 1 << (needed - 1).bit_length()) if needed < _LARGE else -(-needed // _LARGE) * _LARGE
        )
        most = max(_MAX_PINNED, 2 * size)  # a step of long prompts is copied while the one before is stored
        while self._pinned and self._allocated + size > most:  # too small: a larger one takes its place
            self._allocated -= self._pinned.pop(0).numel()
        if self._allocated + size > most:
            raise RuntimeError("captured rows come faster than they can be stored")
        self._allocated += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
