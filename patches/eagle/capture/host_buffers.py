"""Hold captured rows on the host: one request buffer per request, bounded in all by tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from flashpatch.patches.eagle.capture.capture_window import CaptureWindow

_SHARE = 0.05  # of the host's available memory, for all buffers
_LEAST_TOKENS = 8192  # whatever memory there is
_MIN_CAPACITY = 128  # tokens


@dataclass
class Rows:
    """Hold the rows of a step: the input token, its position and the target's states at it.

    Attributes:
        ids, positions: integers [rows].
        hidden: [rows, H]; auxiliary: [rows, k*H] or None.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    auxiliary: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of the states."""
        return self.hidden.nbytes + (self.auxiliary.nbytes if self.auxiliary is not None else 0)


Place = slice | torch.Tensor
"""Numbers of rows, as a slice if they are consecutive."""


def _copy(held: torch.Tensor, at: Place, rows: torch.Tensor, taken: Place) -> None:
    """Copy wide rows, each once."""
    if isinstance(at, slice) and isinstance(taken, torch.Tensor):
        torch.index_select(rows, 0, taken, out=held[at])
    else:
        held[at] = rows[taken]


def join_rows(parts: list[Rows]) -> Rows:
    """Return the rows of all parts, one behind the other; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    wide = [one.auxiliary for one in parts if one.auxiliary is not None]
    joined = ([getattr(one, name) for one in parts] for name in ("ids", "positions", "hidden"))
    return Rows(*map(torch.cat, joined), torch.cat(wide) if wide else None)


class RequestBuffer:
    """Hold the rows of one request at a time.

    Attributes:
        ids: int64 [capacity], the token that was the input at each position.
        hidden: [capacity, H]; auxiliary: [capacity, k*H] or None.
        versions: int64 [capacity], version of the policy that computed the row, -1 if there is none.
    """

    def __init__(self, capacity: int, hidden: torch.Tensor, auxiliary: torch.Tensor | None) -> None:
        self.capacity = capacity
        self.ids = torch.zeros(capacity, dtype=torch.int64)
        self.hidden = torch.empty(capacity, hidden.shape[1], dtype=hidden.dtype)
        self.auxiliary = None
        if auxiliary is not None:
            self.auxiliary = torch.empty(capacity, auxiliary.shape[1], dtype=auxiliary.dtype)
        self.versions = torch.full((capacity,), -1)

    def write(self, at: Place, rows: Rows, taken: Place, version: torch.Tensor) -> None:
        """Write the rows ``taken`` to the positions ``at``."""
        self.ids[at] = rows.ids[taken].long()
        self.versions[at] = version
        _copy(self.hidden, at, rows.hidden, taken)
        if self.auxiliary is not None:
            _copy(self.auxiliary, at, rows.auxiliary, taken)


@dataclass
class Request:
    """Hold a captured request: its name, the positions that are kept, why it was given up ("" if it was not), and its buffer
    once it has one."""

    name: str
    window: CaptureWindow
    lost: str = ""
    buffer: RequestBuffer | None = None


class BufferPool:
    """Make request buffers whose capacities together are bounded.

    Attributes:
        tokens: the bound; 0 until the first buffer is asked for: then a share of the memory that is available.
        allocated: tokens of the buffers in use.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.allocated = 0
        self._lock = threading.Lock()

    def acquire_buffer(self, length: int, like: Rows) -> RequestBuffer | None:
        """Return a buffer for at least ``length`` tokens shaped ``like`` these rows; None if there is no
        room."""
        capacity = max(_MIN_CAPACITY, 1 << (length - 1).bit_length())
        with self._lock:
            if not self.tokens:
                of_a_row = sum(one[:1].nbytes for one in (like.hidden, like.auxiliary) if one is not None)
                self.tokens = max(_LEAST_TOKENS, int(_SHARE * available_bytes() / of_a_row))
            if self.allocated + capacity > self.tokens:
                return None
            self.allocated += capacity
        return RequestBuffer(capacity, like.hidden, like.auxiliary)

    def release_buffer(self, buffer: RequestBuffer | None) -> None:
        """Note, in any thread, that a buffer is not used any more."""
        if buffer is not None:
            with self._lock:
                self.allocated -= buffer.capacity


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the kernel says are available, no more than the container's limit leaves; 0 if unknown."""
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # another kernel, or no limit
        pass
    return min(found, default=0)
