"""Copy the rows of an engine's step to the host without making the engine wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.patches.eagle.capture.host_buffers import Request, Rows

_MAX_PINNED = 16  # pinned buffers for steps that are being copied from an accelerator


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
        return self._from_device(spans, total, ids, positions, hidden, auxiliary, version)

    def _from_device(self, spans, total, ids, positions, hidden, auxiliary, version) -> Step:
        parts = {"ids": ids, "positions": positions, "hidden": hidden}
        for number, layer in enumerate(auxiliary or ()):
            parts[f"auxiliary{number}"] = layer
        if spans[-1][2] - spans[0][1] < total:  # the chosen requests lie within these rows
            first = spans[0][1]
            total = spans[-1][2] - first
            spans = [(request, start - first, end - first) for request, start, end in spans]
            parts = {name: tensor[first:] for name, tensor in parts.items()}
        clones = {name: tensor[:total].clone() for name, tensor in parts.items()}
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
        rows = Rows(pinned["ids"][:total], pinned["positions"][:total], pinned["hidden"][:total], None)
        step = Step(rows, spans, version)

        def wait() -> None:
            event.synchronize()
            if auxiliary:
                layers = [pinned[f"auxiliary{number}"][:total] for number in range(len(auxiliary))]
                rows.auxiliary = torch.cat(layers, dim=-1)

        step.wait, step.release = wait, lambda: self._pinned.append(pinned)
        return step

    def _pinned_for(self, total: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for index, pinned in enumerate(self._pinned):
            if pinned["ids"].shape[0] >= total and pinned.keys() == like.keys():
                return self._pinned.pop(index)
        if self._pinned:  # too small: a larger one takes its place
            self._pinned.pop(0)
            self._allocated -= 1
        if self._allocated >= _MAX_PINNED:
            raise RuntimeError("captured rows come faster than they can be stored")
        self._allocated += 1
        size = max(64, 1 << (total - 1).bit_length())
        return {
            name: torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
            for name, tensor in like.items()
        }
