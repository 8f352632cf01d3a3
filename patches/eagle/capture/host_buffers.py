"""Hold captured rows on the host, in pages of which requests take as many as they need; bounded in all by tokens.

The rows of many steps are filed at once: Python once for each request and step would take longer than the copies, and hold
up the engine's thread meanwhile."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from itertools import chain

import numpy
import torch

from flashpatch.patches.eagle.capture.device_copy import Request, Rows, Step

PAGE = 128  # tokens


class HostBuffers:
    """Hold rows by place: row ``i`` of page ``p`` is at ``p * PAGE + i``.

    Args:
        window: positions of a request's window.
        give_up: called with a request that finds no room, and why.

    Attributes:
        tokens: the bound.
        ids: int64 [tokens], the token that was the input at each place.
        versions: int64 [tokens], version of the policy that computed the row, -1 if there is none."""

    def __init__(self, tokens: int, window: int, give_up: Callable[[Request, str], None]) -> None:
        self.tokens, self._window, self._give_up = tokens, window, give_up
        self.ids = self.versions = numpy.empty(0, dtype=numpy.int64)
        self._wide: dict[str, tuple[torch.dtype, numpy.ndarray]] = {}  # "hidden", "auxiliary"
        self._free: list[int] = []  # pages; only the recorder's thread takes some

    def file(self, steps: list[Step]) -> None:
        """Write the rows of steps, of each position of a request the last."""
        if not self._wide:
            self._take_memory(steps[0].rows)
        batches = dict.fromkeys(step.batch for step in steps)
        every = dict.fromkeys(chain.from_iterable(batch.requests for batch in batches))
        requests = [request for request in every if not request.lost]
        number = {request: at for at, request in enumerate(requests)}
        owners_of = {
            batch: numpy.repeat([number.get(request, -1) for request in batch.requests], batch.lengths)
            for batch in batches
        }
        owners = numpy.concatenate([owners_of[step.batch] for step in steps])
        taken = numpy.concatenate([step.batch.rows for step in steps])
        of_step = numpy.repeat(numpy.arange(len(steps)), [step.batch.captured for step in steps])
        ids, positions = (
            numpy.concatenate([getattr(step.rows, name).numpy()[step.batch.rows] for step in steps])
            for name in ("ids", "positions")
        )
        kept = (owners >= 0).nonzero()[0]
        places = self._places(requests, owners[kept], positions[kept].astype(numpy.int64))
        kept, places = kept[places >= 0], places[places >= 0]
        _, last = numpy.unique(places[::-1], return_index=True)  # a position may have come again
        last = numpy.sort(len(places) - 1 - last)
        kept, places = kept[last], places[last]
        self.ids[places] = ids[kept]
        self.versions[places] = numpy.array([step.version for step in steps])[of_step[kept]]
        bounds = numpy.searchsorted(of_step[kept], numpy.arange(len(steps) + 1)).tolist()
        for step, start, end in zip(steps, bounds, bounds[1:], strict=False):
            rows = taken[kept[start:end]]
            for name, (_, held) in self._wide.items():
                # a row as one number, which numpy copies at once and without Python's lock
                found = getattr(step.rows, name).detach().contiguous().view(torch.uint8).numpy()
                found = found.view(held.dtype)[:, 0]
                held[places[start:end]] = found if len(rows) == len(found) else found[rows]

    def _places(
        self, requests: list[Request], owners: numpy.ndarray, positions: numpy.ndarray
    ) -> numpy.ndarray:
        """Move windows on, make room, and return the place of each row, -1 if it is not kept; ``owners`` are numbers of
        the rows' requests, ``positions`` theirs there."""
        size = self._window
        windows = positions // size
        newer = windows > numpy.array([one.window.last for one in requests], dtype=numpy.int64)[owners]
        many = int(windows.max(initial=0)) + 1
        for pair in numpy.unique(owners[newer] * many + windows[newer]).tolist():
            request = requests[pair // many]
            if request.window.advance((pair % many * size,)):
                self.versions[places_of(request.pages)] = -1
        offsets = positions - numpy.array([one.window.first for one in requests], dtype=numpy.int64)[owners]
        inside = (offsets >= 0) & (offsets < size)
        behind = numpy.zeros(len(requests), dtype=numpy.int64)
        numpy.maximum.at(behind, owners[inside], offsets[inside] + 1)
        # the last token is never an input
        pages = numpy.where(behind > 0, -(-numpy.minimum(behind + 1, size) // PAGE), 0)
        for request, count in zip(requests, pages.tolist(), strict=True):
            if count > len(request.pages):
                self._extend(request, count - len(request.pages))
        counts = numpy.array([len(request.pages) for request in requests], dtype=numpy.int64)
        table = numpy.array([*chain.from_iterable(one.pages for one in requests)], dtype=numpy.int64)
        kept = inside & (offsets // PAGE < counts[owners])  # else there was no room
        firsts, offsets = (numpy.cumsum(counts) - counts)[owners[kept]], offsets[kept]
        places = numpy.full(len(owners), -1)
        places[kept] = table[firsts + offsets // PAGE] * PAGE + offsets % PAGE
        return places

    def _take_memory(self, like: Rows) -> None:
        """Take address space for rows shaped ``like`` these; memory is the system's until a page is used."""
        wide = {"hidden": like.hidden, "auxiliary": like.auxiliary}
        sizes = {
            name: (one.dtype, one.shape[1] * one.itemsize) for name, one in wide.items() if one is not None
        }
        self.ids, self.versions = (numpy.empty(self.tokens, dtype=numpy.int64) for _ in range(2))
        found = {}
        for name, (dtype, size) in sizes.items():  # numpy would ask for huge pages, which take long to find
            memory = mmap.mmap(-1, self.tokens * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            found[name] = dtype, numpy.frombuffer(memory, f"V{size}")
        self._free = [*reversed(range(self.tokens // PAGE))]
        self._wide = found

    def _extend(self, request: Request, count: int) -> None:
        """Give a request so many pages more, or give it up."""
        if len(self._free) >= count:
            pages = [self._free.pop() for _ in range(count)]
            self.versions[places_of(pages)] = -1
            request.pages += pages
        else:
            self._give_up(request, "no memory is left for it")
            self.release_pages(request.pages)
            request.pages = []

    def release_pages(self, pages: list[int]) -> None:
        """Note, in any thread, that pages are not used any more; they are the first to be used again."""
        self._free += pages

    def read(self, places: numpy.ndarray, known: numpy.ndarray) -> dict[str, torch.Tensor]:
        """Return copies of the hidden and auxiliary states, 0 where not ``known``."""
        found = {}
        for name, (dtype, held) in self._wide.items():
            rows = held[places].view(numpy.uint8).reshape(len(places), -1)
            rows[~known] = 0
            found[name] = torch.from_numpy(rows).view(dtype)
        return found


def places_of(pages: Sequence[int]) -> numpy.ndarray:
    """Return the places of all rows of pages, in their order."""
    return (numpy.array(pages, dtype=numpy.int64)[:, None] * PAGE + numpy.arange(PAGE)).ravel()
