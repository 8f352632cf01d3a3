"""Turn the rows that an engine computes into samples: the state at each position of a request, kept on the
host.

An engine that speculates feeds draft tokens too, and feeds the right token at a position again when a draft
there was rejected. So for every request the *last* row seen at a position is the right one, once the request
has gone past it; nothing needs to be known about acceptance while it runs. When the request is over the
engine says which tokens it kept, and rows whose input was another token are masked.

Of a long request one window is kept, see `capture_window`.

The engine's thread only notes what it saw; the rest is done in a thread of this module. Nothing here raises
into the engine: what cannot be kept is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from flashpatch import ledger
from flashpatch.patches.eagle.capture.capture_window import DRAWS, CaptureWindow
from flashpatch.patches.eagle.capture.device_copy import DeviceCopy, Step
from flashpatch.patches.eagle.capture.host_buffers import (
    BufferPool,
    Place,
    Request,
    RequestBuffer,
    Rows,
    join_rows,
)
from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter, queue_directory

logger = logging.getLogger("flashpatch.eagle")

_BATCH = 32  # steps that are stored at once
_BATCH_BYTES = 64 << 20  # of their states, from which on no more are waited for
_BATCH_SECONDS = 1.0  # that a step, or the end of a request, may wait for others
_LENGTHS = (512, 2048, 8192, 32768)  # positions, by which lost requests are counted
_MAX_WAITING = 256  # steps; then the requests in the next one are given up


@dataclass
class _Finished:
    """Hold requests that are over, with their tokens and prompt lengths; or a barrier for `Recorder.flush`."""

    requests: list[tuple[Request, Sequence[int], int]] = field(default_factory=list)
    passed: threading.Event | None = None


class Recorder:
    """Keep the rows of some requests, and pass finished ones to the sample queue.

    Args:
        writer: of the sample queue.
        rate: share of requests that are captured.
        budget: rows captured per policy version before no new request is taken on; 0: any number.
        tokens: capacity of all request buffers together; 0: a share of the host's available memory.
        window: most positions kept of a request.
        report: called now and then, from the recorder's thread, with `counts`.

    Attributes:
        version: of the policy that is running now, set by the engine's side.
        counts: ``rows``, ``requests`` (offered), ``skipped`` (by rate or budget), ``lost`` (given up: no
            memory, too many waiting steps, error), of which ``lost_to_512`` and so on up to a length of so many
            positions, ``empty`` (nothing seen), ``mismatched`` (rows masked because another token had been the
            input).
    """

    def __init__(
        self,
        writer: SampleWriter,
        rate: float = 1.0,
        budget: int = 0,
        tokens: int = 0,
        window: int = 512,
        report: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self.writer, self.rate, self.budget, self.window = writer, rate, budget, window
        self.report = report
        self.version = 0
        self.counts: Counter[str] = Counter(rows=0, requests=0, skipped=0, lost=0, empty=0, mismatched=0)
        self.problem = ""
        self._running: dict[str, Request | None] = {}
        self._spent: Counter[int] = Counter()
        self._queue: queue.SimpleQueue[Step | _Finished | None] = queue.SimpleQueue()
        self._pool = BufferPool(tokens)
        self._device_copy = DeviceCopy()
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
                request = running[name] if name in running else self._admit(name)
                if request is not None and not request.lost:
                    spans.append((request, at, at + length))
                at += length
            if not spans:
                return
            if self._queue.qsize() >= _MAX_WAITING:
                raise RuntimeError("captured rows come faster than they can be stored")
            captured = sum([end - start for _, start, end in spans])
            self._spent[self.version] += captured
            self.counts["rows"] += captured
            self._put(self._device_copy.copy_rows(spans, at, ids, positions, hidden, auxiliary, self.version))
        except Exception as error:
            self._fault(error)
            for request, _, _ in spans:
                self._give_up(request, str(error))

    def finish(self, finished: Mapping[str, tuple[Sequence[int], int] | None]) -> None:
        """Finish requests that are over. Never raises.

        Args:
            finished: the tokens that the engine kept of each, and how many of these were the prompt; None for
                a request whose tokens are not known.
        """
        try:
            known = []
            for name, tokens in finished.items():
                request = self._running.pop(name, None)
                if request is not None:
                    known.append((request, *(tokens or ((), 0))))
            if known:
                self._put(_Finished(known))
        except Exception as error:
            self._fault(error)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was noted is stored; return whether it was within ``timeout`` seconds."""
        if self._thread is None:
            return True
        end = _Finished(passed=threading.Event())
        self._queue.put(end)
        return end.passed.wait(timeout)

    def stored(self) -> dict[str, Any]:
        """Wait until what was noted is stored; return `counts`, and ``queue``, the directory of the samples."""
        self.flush()
        return {**self.counts, "queue": str(self.writer.directory)}

    def close(self, timeout: float = 5.0) -> None:
        """Store what is waiting and close the writer."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)
        self.writer.close(timeout)

    def _admit(self, name: str) -> Request | None:
        full = self.budget and self._spent[self.version] >= self.budget
        request = None
        if not full and DRAWS.random() < self.rate:
            request = Request(name, CaptureWindow(self.window))
        self._running[name] = request
        if request is None:
            self.counts["skipped"] += 1
        return request

    def _put(self, item: Step | _Finished) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="flashpatch-recorder", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _give_up(self, request: Request, why: str) -> None:
        if not request.lost:
            request.lost = why
            length = request.window.length
            reached = next((f"to_{most}" for most in _LENGTHS if length <= most), f"above_{_LENGTHS[-1]}")
            self.counts["lost"] += 1
            self.counts[f"lost_{reached}"] += 1

    def _fault(self, error: Exception) -> None:
        if not self.problem:
            logger.warning("hidden states are not captured: %s: %s", type(error).__name__, error)
        self.problem = f"{type(error).__name__}: {error}"

    # -- the recorder's thread -----------------------------------------------------------------------

    def _work(self) -> None:
        going = True
        while going:
            steps, ended, going = self._collect()
            try:
                with torch.no_grad():
                    if steps:
                        self._store(steps)
                    for end in ended:
                        for request, tokens, prompt in end.requests:
                            self._offer(request, tokens, prompt)
            except Exception as error:
                self._fault(error)
                for request in {id(r): r for step in steps for r, _, _ in step.spans}.values():
                    self._give_up(request, str(error))
            if ended and ended[-1].passed is not None:
                self._report(now=True)
                ended[-1].passed.set()
            self._report(now=not going)

    def _collect(self) -> tuple[list[Step], list[_Finished], bool]:
        """Return steps to store together, what ended meanwhile, up to a barrier, and whether to go on."""
        steps: list[Step] = []
        ended: list[_Finished] = []
        size, item = 0, self._queue.get()
        deadline = time.monotonic() + _BATCH_SECONDS
        while item is not None:
            if isinstance(item, Step):
                steps.append(item)
                size += item.rows.nbytes
            else:
                ended.append(item)
            barrier = not isinstance(item, Step) and item.passed is not None
            if barrier or len(steps) >= _BATCH or size >= _BATCH_BYTES:
                return steps, ended, True
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return steps, ended, True
        return steps, ended, False

    def _store(self, steps: list[Step]) -> None:
        """Gather the rows of steps, order them by request, and write those of each request."""
        try:
            if steps[-1].wait is not None:  # copies end in the order in which they began
                steps[-1].wait()
            rows = join_rows([step.rows for step in steps])
            versions = numpy.repeat([step.version for step in steps], [len(step.rows.ids) for step in steps])
            firsts = numpy.cumsum([0, *(len(step.rows.ids) for step in steps)])
            spans = [
                (request, first + start, end - start)
                for step, first in zip(steps, firsts, strict=False)
                for request, start, end in step.spans
            ]
            requests = {id(request): request for request, _, _ in spans}
            number = {name: place for place, name in enumerate(requests)}
            lengths = numpy.array([length for _, _, length in spans])
            owners = numpy.repeat([number[id(request)] for request, _, _ in spans], lengths)
            ends = numpy.cumsum(lengths)
            at = numpy.arange(ends[-1]) + numpy.repeat(
                [first for _, first, _ in spans] - (ends - lengths), lengths
            )
            at = at[numpy.argsort(owners, kind="stable")]
            positions = rows.positions.numpy()
            parts = numpy.split(at, numpy.cumsum(numpy.bincount(owners, minlength=len(number)))[:-1])
            for request, part in zip(requests.values(), parts, strict=True):
                if not request.lost:
                    self._write(request, rows, part, positions[part], versions[part])
        finally:
            for step in steps:
                if step.release is not None:
                    step.release()

    def _write(
        self,
        request: Request,
        rows: Rows,
        at: numpy.ndarray,
        positions: numpy.ndarray,
        versions: numpy.ndarray,
    ) -> None:
        """Write the rows ``at`` into the request's buffer, of each position the last."""
        window = request.window
        if window.advance(positions.tolist()) and request.buffer is not None:
            request.buffer.versions.fill_(-1)
        offsets = positions - window.first
        keep = ((offsets >= 0) & (offsets < window.size)).nonzero()[0]
        if not len(keep):
            return
        behind = int(offsets[keep].max()) + 1
        # the last token is never an input
        buffer = self._buffer_for(request, min(behind + 1, window.size), rows)
        if buffer is None:
            return
        if not (numpy.diff(offsets[keep]) > 0).all():  # a position came again
            _, last = numpy.unique(offsets[keep][::-1], return_index=True)
            keep = keep[len(keep) - 1 - last]
        buffer.write(_places(offsets[keep]), rows, _places(at[keep]), torch.from_numpy(versions[keep]))

    def _buffer_for(self, request: Request, length: int, like: Rows) -> RequestBuffer | None:
        """Return the request's buffer with space for ``length`` tokens; None, and give it up, if there is
        none."""
        buffer = request.buffer
        if buffer is not None and buffer.capacity >= length:
            return buffer
        larger = self._pool.acquire_buffer(length, like)
        if larger is None:
            self._give_up(request, "no memory is left for it")
        elif buffer is not None:
            n = buffer.capacity
            old = Rows(buffer.ids, buffer.ids, buffer.hidden, buffer.auxiliary)
            larger.write(slice(0, n), old, slice(0, n), buffer.versions)
        self._pool.release_buffer(buffer)
        request.buffer = larger
        return larger

    def _offer(self, request: Request, tokens: Sequence[int], prompt: int) -> None:
        total = len(tokens)
        buffer, first = request.buffer, request.window.first
        held = min(request.window.size, buffer.capacity) if buffer is not None else 0
        tokens = tokens[first : first + held]
        n, last = len(tokens), first + len(tokens) == total
        request.buffer = None
        known = torch.zeros(n, dtype=torch.bool)
        seen = max(0, n - last)
        if not request.lost and seen:
            ids = torch.tensor(tokens, dtype=torch.int64)
            versions, same = buffer.versions[:seen], buffer.ids[:seen] == ids[:seen]
            version = int(versions.max())
            known[:seen] = (versions == version) & same & (versions >= 0)
            self.counts["mismatched"] += int(((versions >= 0) & ~same).sum())
        if not bool(known.any()):
            self.counts["empty"] += not request.lost
            self._pool.release_buffer(buffer)
            return
        hidden = buffer.hidden[:n]
        hidden[~known] = 0
        auxiliary = None
        if buffer.auxiliary is not None:
            auxiliary = buffer.auxiliary[:n]
            auxiliary[~known] = 0
        response = torch.arange(first, first + n) >= prompt
        sample = Sample(request.name, ids, hidden, known, response, version, auxiliary)
        self.counts["requests"] += 1
        self.writer.offer(sample, lambda: self._pool.release_buffer(buffer))

    def _report(self, now: bool = False) -> None:
        if self.report is not None and (now or time.monotonic() - self._reported > 1.0):
            self._reported = time.monotonic()
            try:
                self.report({**self.counts, **{f"ring_{name}": n for name, n in self.writer.counts.items()}})
            except Exception as error:
                self._fault(error)


def _places(numbers: numpy.ndarray) -> Place:
    """Return numbers as an index, as a slice if they are consecutive."""
    if (numpy.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers).long()


def make_recorder(options: Mapping[str, Any]) -> Recorder:
    """Make the recorder that the family's options describe; it reports to the ledger."""
    directory = queue_directory(options["samples"])
    ledger.note(eagle_samples=str(directory))
    return Recorder(
        SampleWriter(directory),
        options["capture_rate"],
        options["capture_budget"],
        window=options["capture_window"],
        report=lambda counts: ledger.note(eagle_capture=dict(counts)),
    )
