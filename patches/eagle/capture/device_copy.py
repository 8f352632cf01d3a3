"""Hold what an engine's steps computed, and copy it to the host without making the engine wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import torch

from flashpatch.patches.eagle.capture.capture_window import CaptureWindow

# bytes of the pinned buffers for steps that are being copied, if two of the largest need no more
_MAX_PINNED = 1 << 30
_LARGE = 64 << 20  # bytes; a large buffer is of a multiple of them


@dataclass
class Rows:
    """Hold the rows of a step: the input token, its position and the target's states at it.

    Attributes:
        ids, positions: integers [rows].
        hidden: [rows, H]; auxiliary: [rows, k*H] or None."""

    ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    auxiliary: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of the states."""
        return self.hidden.nbytes + (self.auxiliary.nbytes if self.auxiliary is not None else 0)


@dataclass(eq=False)
class Request:
    """Hold a captured request: its name, the positions that are kept, why it was given up ("" if it was not), the pages of
    the pool that hold its rows, and whether rows of it were left out as the budget was spent."""

    name: str
    window: CaptureWindow
    lost: str = ""
    pages: list[int] = field(default_factory=list)
    is_cut: bool = False


class Batch:
    """Hold the captured requests of a step; the same object for steps that are alike.

    Args:
        found: the request, or None, of each name in the step; lengths: rows of each.
        most: rows that are captured of each, its last ones: what lies further back in a prompt teaches nothing.

    Attributes:
        requests: those that are captured; lengths: captured rows of each; captured: of all.
        first, behind: the rows of the step within which theirs lie."""

    def __init__(self, found: Sequence[Request | None], lengths: Sequence[int], most: int) -> None:
        captured = {at: one for at, one in enumerate(found) if one is not None and not one.lost}
        self.requests, taken = [*captured.values()], numpy.array([*captured], dtype=numpy.int64)
        ends = numpy.cumsum(lengths, dtype=numpy.int64)[taken]
        self.lengths = numpy.array(lengths, dtype=numpy.int64)[taken].clip(max=most)
        self.captured = int(self.lengths.sum())
        self._starts = ends - self.lengths
        self.first, self.behind = (int(self._starts[0]), int(ends[-1])) if captured else (0, 0)

    @cached_property
    def rows(self) -> numpy.ndarray:
        """Return the numbers of the captured rows, counted from ``first``."""
        before = numpy.cumsum(self.lengths) - self.lengths
        return numpy.repeat(self._starts - self.first - before, self.lengths) + numpy.arange(self.captured)


@dataclass
class Step:
    """Hold the rows of a step that are on the host, or will be.

    Attributes:
        rows: from the batch's first to its last.
        version: of the policy that computed the rows.
        wait: blocks until the rows are on the host.
        release: frees the memory of the rows."""

    rows: Rows
    batch: Batch
    version: int
    wait: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


class DeviceCopy:
    """Copy rows to the host.

    On a CPU nothing is copied but the small inputs, which the engine overwrites. From an accelerator all rows of a step are
    packed into one tensor on the engine's stream, which is quick, and copied on a stream of their own into pinned memory
    that is used again: two launches, and one more for auxiliary layers. It is taken for 32 steps at once: the driver needs
    milliseconds, in which the device rests."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pinned: list[torch.Tensor] = []  # bytes
        self._allocated = 0

    def copy_rows(
        self,
        batch: Batch,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        auxiliary: Sequence[torch.Tensor] | None,
        version: int,
    ) -> Step:
        """Start to copy the rows of a batch; tensors as in `Recorder.step`. Raises RuntimeError if too many copies from
        an accelerator are under way."""
        if hidden.device.type != "cpu":
            return self._from_device(batch, ids, positions, hidden, auxiliary, version)
        own = slice(batch.first, batch.behind)
        wide = torch.cat([layer[own] for layer in auxiliary], dim=-1) if auxiliary else None
        return Step(Rows(ids[own].clone(), positions[own].clone(), hidden[own], wide), batch, version)

    def _from_device(self, batch, ids, positions, hidden, auxiliary, version) -> Step:
        own = slice(batch.first, batch.behind)
        parts = {"ids": ids[own], "positions": positions[own], "hidden": hidden[own]}
        if auxiliary:
            parts["auxiliary"] = torch.cat([layer[own] for layer in auxiliary], dim=-1)
        host = {name: part.clone() for name, part in parts.items() if part.device != hidden.device}
        # The widest numbers first, so that each part begins at a multiple of its own width.
        there = sorted((name for name in parts if name not in host), key=lambda name: -parts[name].itemsize)
        packed = torch.cat([parts[name].contiguous().view(-1).view(torch.uint8) for name in there])
        pinned = self._pinned_for(packed.numel())
        event = self._copy(packed, pinned[: packed.numel()])
        at = 0
        for name in there:
            part = parts[name]
            host[name] = pinned[at : at + part.nbytes].view(part.dtype).view(part.shape)
            at += part.nbytes
        rows = Rows(host["ids"], host["positions"], host["hidden"], host.get("auxiliary"))
        return Step(rows, batch, version, event.synchronize, lambda: self._pinned.append(pinned))

    def _copy(self, packed: torch.Tensor, pinned: torch.Tensor) -> Any:
        """Copy on the stream of copies, once the engine's stream has packed; return the event that follows.

        Streams are set, and named by number: torch's context of a stream asks the environment four times for the device."""
        device, index = torch.get_device_module(packed.device), packed.get_device()
        if self._stream is None:
            self._stream = device.Stream(index)
        engine = device.current_stream(index)
        self._stream.wait_stream(engine)
        event = device.Event()
        device.set_stream(self._stream)
        try:
            pinned.copy_(packed, non_blocking=True)
            event.record(self._stream)
        finally:
            device.set_stream(engine)
        packed.record_stream(self._stream)
        return event

    def _pinned_for(self, needed: int) -> torch.Tensor:
        for index, pinned in enumerate(self._pinned):
            if pinned.numel() >= needed:
                return self._pinned.pop(index)
        size = (
            max(1 << 16, 1 << (needed - 1).bit_length()) if needed < _LARGE else -(-needed // _LARGE) * _LARGE
        )
        block = max(size, min(_LARGE, 32 * size))  # of several buffers
        most = max(_MAX_PINNED, 2 * size)  # a step of long prompts is copied while the one before is stored
        while self._pinned and self._allocated + block > most:  # too small: a larger one takes its place
            self._allocated -= self._pinned.pop(0).numel()
        if self._allocated + block > most:
            raise RuntimeError("captured rows come faster than they can be stored")
        self._allocated += block
        self._pinned += torch.empty(block, dtype=torch.uint8, pin_memory=True).split(size)
        return self._pinned.pop()
