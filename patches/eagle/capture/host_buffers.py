"""Host memory for captured rows: a book per request, from a shelf that holds so many tokens and no more."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

_SMALLEST = 128  # tokens of the smallest book


@dataclass
class Rows:
    ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    auxiliary: torch.Tensor | None


def cut(rows: Rows, start: int, end: int) -> Rows:
    side = rows.auxiliary[start:end] if rows.auxiliary is not None else None
    return Rows(rows.ids[start:end], rows.positions[start:end], rows.hidden[start:end], side)


class RequestBuffer:
    """Host memory for one request at a time.

    Attributes:
        ids: int64 [capacity], the token that was the input at each position.
        hidden: [capacity, H]; auxiliary: [capacity, k*H] or None.
        versions: int64 [capacity], the policy that made the row, -1 where there is none.
    """

    def __init__(self, capacity: int, hidden: torch.Tensor, auxiliary: torch.Tensor | None) -> None:
        self.capacity = capacity
        self.ids = torch.zeros(capacity, dtype=torch.int64)
        self.hidden = torch.empty(capacity, hidden.shape[1], dtype=hidden.dtype)
        self.auxiliary = None
        if auxiliary is not None:
            self.auxiliary = torch.empty(capacity, auxiliary.shape[1], dtype=auxiliary.dtype)
        self.versions = torch.full((capacity,), -1)

    def write(self, at: slice | torch.Tensor, rows: Rows, version: torch.Tensor | int) -> None:
        self.ids[at] = rows.ids.long()
        self.hidden[at] = rows.hidden
        self.versions[at] = version
        if self.auxiliary is not None:
            self.auxiliary[at] = rows.auxiliary


@dataclass
class Request:
    name: str
    lost: str = ""
    book: RequestBuffer | None = None


class BufferPool:
    """Books, used again and again; their capacities together are bounded."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.held = 0
        self._free: list[RequestBuffer] = []
        self._lock = threading.Lock()

    def take(self, length: int, like: Rows) -> RequestBuffer | None:
        capacity = max(_SMALLEST, 1 << (length - 1).bit_length())
        with self._lock:
            for index, book in enumerate(self._free):
                if capacity <= book.capacity <= 2 * capacity:
                    del self._free[index]
                    book.versions.fill_(-1)
                    return book
            while self._free and self.held + capacity > self.tokens:
                self.held -= self._free.pop().capacity
            if self.held + capacity > self.tokens:
                return None
            self.held += capacity
        return RequestBuffer(capacity, like.hidden, like.auxiliary)

    def give(self, book: RequestBuffer | None) -> None:
        if book is not None:
            with self._lock:
                self._free.append(book)
