"""From the rows an engine computes to samples: what each request's positions held, kept on the host.

An engine that speculates feeds draft tokens too, and feeds the right token at a position again when a draft
there was rejected. So for every request the *last* row seen at a position is the right one, once the request
has gone past it; nothing needs to be known about acceptance while it runs. When the request is over the engine
says which tokens it kept, and rows whose input was another token are masked.

The engine's thread only notes what it saw; the rest is done in a thread of this module. Nothing here raises
into the engine: what cannot be kept is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from flashpatch.patches.eagle.capture.device_copy import Staging, Step
from flashpatch.patches.eagle.capture.host_buffers import BufferPool, Request, RequestBuffer, Rows, cut
from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import Writer

logger = logging.getLogger("flashpatch.eagle")

_TOGETHER = 32  # steps that are filed at once where rows need no copying
_LINGER = 1.0  # seconds that a step may wait for others, unless a request ends
_BACKLOG = 256  # steps that may wait; then the requests in the next one are given up


def chosen(request: str, rate: float, seed: int = 0) -> bool:
    """Whether a request is captured: the same answer in every process."""
    return rate >= 1 or zlib.crc32(f"{seed}:{request}".encode()) < rate * 2**32


@dataclass
class _End:
    """Requests that are over, with their tokens and prompt lengths; or a barrier."""

    requests: list[tuple[Request, Sequence[int], int]] = field(default_factory=list)
    passed: threading.Event | None = None


class Recorder:
    """Keeps rows of chosen requests and hands finished ones to the ring.

    Args:
        writer: the ring's end.
        rate: share of requests that are captured.
        budget: rows captured per policy version before no new request is taken on; 0: any number.
        tokens: capacity of all books together.
        seed: of the choice.
        report: called now and then, from the recorder's thread, with `counts`.

    Attributes:
        version: of the policy that is running now; the engine's side sets it.
        counts: ``rows``, ``requests`` (offered), ``skipped`` (by rate or budget), ``lost`` (given up: no
            memory, backlog, error), ``empty`` (nothing seen), ``mismatched`` (rows masked because another
            token had been the input).
    """

    def __init__(
        self,
        writer: Writer,
        rate: float = 1.0,
        budget: int = 0,
        tokens: int = 65536,
        seed: int = 0,
        report: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self.writer, self.rate, self.budget, self.tokens, self.seed = writer, rate, budget, tokens, seed
        self.report = report
        self.version = 0
        self.counts: Counter[str] = Counter(rows=0, requests=0, skipped=0, lost=0, empty=0, mismatched=0)
        self.problem = ""
        self._running: dict[str, Request | None] = {}
        self._spent: Counter[int] = Counter()
        self._queue: queue.SimpleQueue[Step | _End | None] = queue.SimpleQueue()
        self._shelf = BufferPool(tokens)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._reported = 0.0

    # -- the engine's thread -------------------------------------------------------------------------

    def step(
        self,
        requests: Iterable[str],
        lengths: Iterable[int],
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        auxiliary: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Note what a forward computed. Never raises.

        Args:
            requests: in the order of their rows; lengths: rows of each.
            ids, positions: integers [rows or more], the inputs; they may change after the call.
            hidden: [rows or more, H], final states, which on a CPU must stay as they are.
            auxiliary: tensors [rows or more, H], the layers EAGLE-3 reads.
        """
        spans: list[tuple[Request, int, int]] = []
        try:
            at = 0
            running = self._running
            for name, length in zip(requests, lengths, strict=True):
                request = running[name] if name in running else self._meet(name)
                if request is not None and not request.lost:
                    spans.append((request, at, at + length))
                at += length
            if not spans:
                return
            if self._queue.qsize() >= _BACKLOG:
                raise RuntimeError("captured rows come faster than they can be filed")
            taken = sum(end - start for _, start, end in spans)
            self._spent[self.version] += taken
            self.counts["rows"] += taken
            self._put(self._staging.take(spans, at, ids, positions, hidden, auxiliary, self.version))
        except Exception as error:
            self._fault(error)
            for request, _, _ in spans:
                self._give_up(request, str(error))

    def finish(self, ended: Mapping[str, tuple[Sequence[int], int] | None]) -> None:
        """Requests are over: their tokens as the engine kept them, and how many of these were the prompt; None
        for a request whose tokens are not known. Never raises."""
        try:
            known = []
            for name, truth in ended.items():
                request = self._running.pop(name, None)
                if request is not None:
                    known.append((request, *(truth or ((), 0))))
            if known:
                self._put(_End(known))
        except Exception as error:
            self._fault(error)

    def flush(self, patience: float = 10.0) -> bool:
        """Wait until all that was noted is filed; whether it was."""
        if self._thread is None:
            return True
        end = _End(passed=threading.Event())
        self._queue.put(end)
        return end.passed.wait(patience)

    def close(self, patience: float = 5.0) -> None:
        """File what is waiting and close the writer."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(patience)
        self.writer.close(patience)

    def _meet(self, name: str) -> Request | None:
        full = self.budget and self._spent[self.version] >= self.budget
        request = None if full or not chosen(name, self.rate, self.seed) else Request(name)
        self._running[name] = request
        if request is None:
            self.counts["skipped"] += 1
        return request

    def _put(self, item: Step | _End) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="flashpatch-recorder", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _give_up(self, request: Request, why: str) -> None:
        if not request.lost:
            request.lost = why
            self.counts["lost"] += 1

    def _fault(self, error: Exception) -> None:
        if not self.problem:
            logger.warning("hidden states are not captured: %s: %s", type(error).__name__, error)
        self.problem = f"{type(error).__name__}: {error}"

    # -- the recorder's thread -----------------------------------------------------------------------

    def _work(self) -> None:
        going = True
        while going:
            steps, end, going = self._collect()
            try:
                with torch.no_grad():
                    self._file(steps)
                    if end is not None:
                        for request, tokens, prompt in end.requests:
                            self._end(request, tokens, prompt)
            except Exception as error:
                self._fault(error)
                for request in {id(r): r for step in steps for r, _, _ in step.spans}.values():
                    self._give_up(request, str(error))
            if end is not None and end.passed is not None:
                self._tell(now=True)
                end.passed.set()
            self._tell(now=not going)

    def _collect(self) -> tuple[list[Step], _End | None, bool]:
        """Steps to be filed together, and what came behind them."""
        steps: list[Step] = []
        item = self._queue.get()
        deadline = time.monotonic() + _LINGER
        while isinstance(item, Step):
            steps.append(item)
            if item.arrive is not None or len(steps) >= _TOGETHER:
                return steps, None, True
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return steps, None, True
        return steps, item, item is not None

    def _file(self, steps: list[Step]) -> None:
        try:
            pieces: dict[int, tuple[Request, list[tuple[Step, int, int]]]] = {}
            for step in steps:
                if step.arrive is not None:
                    step.arrive()
                for request, start, end in step.spans:
                    pieces.setdefault(id(request), (request, []))[1].append((step, start, end))
            for request, parts in pieces.values():
                if not request.lost:
                    self._write(request, parts)
        finally:
            for step in steps:
                if step.release is not None:
                    step.release()

    def _write(self, request: Request, parts: list[tuple[Step, int, int]]) -> None:
        positions = numpy.concatenate([step.rows.positions[start:end].numpy() for step, start, end in parts])
        book = self._room(request, int(positions.max()) + 1, parts[0][0].rows)
        if book is None:
            return
        if len(parts) == 1:  # one forward never has a position twice
            step, start, end = parts[0]
            rows = cut(step.rows, start, end)
            first = int(positions[0])
            straight = positions[-1] - first == len(positions) - 1
            at = slice(first, first + len(positions)) if straight else torch.from_numpy(positions).long()
            book.write(at, rows, step.version)
            return
        _, last = numpy.unique(positions[::-1], return_index=True)
        keep = torch.from_numpy(len(positions) - 1 - last)
        cuts = [cut(step.rows, start, end) for step, start, end in parts]
        versions = numpy.concatenate([numpy.full(end - start, step.version) for step, start, end in parts])
        rows = Rows(
            torch.cat([cut.ids for cut in cuts])[keep],
            torch.from_numpy(positions).long()[keep],
            torch.cat([cut.hidden for cut in cuts])[keep],
            torch.cat([cut.auxiliary for cut in cuts])[keep] if book.auxiliary is not None else None,
        )
        book.write(rows.positions, rows, torch.from_numpy(versions)[keep])

    def _room(self, request: Request, length: int, like: Rows) -> RequestBuffer | None:
        """The request's book, with space for ``length`` tokens."""
        book = request.book
        if book is not None and book.capacity >= length:
            return book
        larger = self._shelf.take(length, like)
        if larger is None:
            self._give_up(request, "no memory is left for it")
        elif book is not None:
            n = book.capacity
            old = Rows(book.ids, book.ids, book.hidden, book.auxiliary)
            larger.write(slice(0, n), old, book.versions)
        self._shelf.give(book)
        request.book = larger
        return larger

    def _end(self, request: Request, tokens: Sequence[int], prompt: int) -> None:
        book, n = request.book, len(tokens)
        request.book = None
        if request.lost or book is None or n < 2:
            self.counts["empty"] += not request.lost
            self._shelf.give(book)
            return
        ids = torch.tensor(tokens, dtype=torch.int64)
        seen = min(n - 1, book.capacity)  # the last token was never an input
        known = torch.zeros(n, dtype=torch.bool)
        versions, same = book.versions[:seen], book.ids[:seen] == ids[:seen]
        version = int(versions.max()) if seen else -1
        known[:seen] = (versions == version) & same & (versions >= 0)
        self.counts["mismatched"] += int(((versions >= 0) & ~same).sum())
        if not bool(known.any()):
            self.counts["empty"] += 1
            self._shelf.give(book)
            return
        if book.capacity < n:  # by one: the last token
            request.book = book
            book = self._room(request, n, Rows(book.ids, book.ids, book.hidden, book.auxiliary))
            request.book = None
            if book is None:
                return
        hidden = book.hidden[:n]
        hidden[~known] = 0
        auxiliary = None
        if book.auxiliary is not None:
            auxiliary = book.auxiliary[:n]
            auxiliary[~known] = 0
        sample = Sample(request.name, ids, hidden, known, torch.arange(n) >= prompt, version, auxiliary)
        self.counts["requests"] += 1
        self.writer.offer(sample, lambda: self._shelf.give(book))

    def _tell(self, now: bool = False) -> None:
        if self.report is not None and (now or time.monotonic() - self._reported > 1.0):
            self._reported = time.monotonic()
            try:
                self.report({**self.counts, **{f"ring_{name}": n for name, n in self.writer.counts.items()}})
            except Exception as error:
                self._fault(error)
