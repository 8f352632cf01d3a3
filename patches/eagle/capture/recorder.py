"""Turn the rows that an engine computes into samples: the state at each position of a request, kept on the host.

An engine that speculates feeds draft tokens too, and feeds the right token at a position again when a draft
there was rejected. So for every request the *last* row seen at a position is the right one, once the request
has gone past it; nothing needs to be known about acceptance while it runs. When the request is over the
engine says which tokens it kept, and rows whose input was another token are masked.

Of a long request one window is kept, see `capture_window`.

The engine's thread only notes what it saw; the rest is done in a thread of this module. Nothing here raises
into the engine: what cannot be kept is dropped and counted."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from flashpatch import ledger, user_directories
from flashpatch.ledger import files
from flashpatch.patches.eagle.capture.capture_window import CaptureWindow
from flashpatch.patches.eagle.capture.device_copy import Batch, DeviceCopy, Request, Step
from flashpatch.patches.eagle.capture.host_buffers import PAGE, HostBuffers, places_of
from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter

logger = logging.getLogger("flashpatch.eagle")

_BATCH = 32  # steps that are stored at once
_BATCH_BYTES = 64 << 20  # of their states, from which on no more are waited for
_BATCH_SECONDS = 1.0  # that a step, or the end of a request, may wait for others
_MAX_WAITING = 256  # steps; then the requests in the next one are given up
_TOKENS = 1 << 19  # for which buffers have places, unless the budget is larger; memory is taken by use


_Finished = list[tuple[Request, Sequence[int], int]]
"""Requests that are over, with their tokens and prompt lengths."""


class Recorder:
    """Keep the rows of some requests, and pass finished ones to the sample queue.

    Args:
        writer: of the sample queue.
        budget: rows captured per policy version, from which on no step is captured; 0: any number.
        window: most positions kept of a request.
        named: the user named the queue's directory for a reader of his own: captured from the start, and kept when the engine ends.
        report: called now and then, from the recorder's thread, with `counts`.

    Attributes:
        version: of the policy that is running now, set by the engine's side.
        counts: ``rows``, ``requests`` (offered), ``skipped`` (by budget), ``lost`` (given up: no memory, too
            many waiting steps, error), ``empty`` (nothing seen), ``mismatched`` (rows masked because another token had been the input)."""

    def __init__(
        self,
        writer: SampleWriter,
        budget: int = 0,
        window: int = 512,
        named: bool = True,
        report: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self.writer, self.budget, self.window = writer, budget, window
        self.named, self.report = named, report
        self.version = 0
        self.counts: Counter[str] = Counter(rows=0, requests=0, skipped=0, lost=0, empty=0, mismatched=0)
        self.problem = ""
        self._running: dict[str, Request | None] = {}
        self._spent: Counter[int] = Counter()
        self._batch = Batch((), (), window)  # of the last step
        self._alike: Any = None  # what must be the same for it to serve again
        self._queue: queue.SimpleQueue[Step | _Finished | threading.Event | None] = queue.SimpleQueue()
        self._buffers = HostBuffers(max(budget, _TOKENS), window, self._give_up)
        self._device_copy = DeviceCopy()
        self._thread: threading.Thread | None = None
        self._reported = 0.0
        self._is_read = named

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
        """Note what a forward computed, if somebody reads it. Never raises.

        Args:
            requests: in the order of their rows; lengths: rows of each.
            ids, positions: integers [rows or more], the inputs; they may change after the call.
            hidden: [rows or more, H], final states, which on a CPU must stay as they are.
            auxiliary: tensors [rows or more, H], the layers EAGLE-3 reads."""
        if not self._is_read:
            return
        names: list[str] = []
        try:
            names = list(requests)
            batch = self._batch_of(names, list(lengths))
            if not batch.requests:
                return
            if self._is_spent():
                for request in batch.requests:
                    request.is_cut = True
                return
            if self._queue.qsize() >= _MAX_WAITING:
                raise RuntimeError("captured rows come faster than they can be stored")
            self._spent[self.version] += batch.captured
            self.counts["rows"] += batch.captured
            self._put(self._device_copy.copy_rows(batch, ids, positions, hidden, auxiliary, self.version))
        except Exception as error:
            self._fault(error)
            for request in filter(None, map(self._running.get, names)):
                self._give_up(request, str(error))

    def finish(self, finished: Mapping[str, tuple[Sequence[int], int] | None]) -> None:
        """Finish requests that are over: the tokens that the engine kept of each, and how many of these were the
        prompt; None for a request whose tokens are not known. Never raises."""
        try:
            self._alike = None
            over = {self._running.pop(name, None): tokens for name, tokens in finished.items()}
            known = [(one, *(tokens or ((), 0))) for one, tokens in over.items() if one is not None]
            if known:
                self._put(known)
        except Exception as error:
            self._fault(error)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was noted is stored; return whether it was within ``timeout`` seconds."""
        if self._thread is None:
            return True
        passed = threading.Event()
        self._queue.put(passed)
        return passed.wait(timeout)

    def stored(self, reads: bool = True) -> dict[str, Any]:
        """Wait until what was noted is stored; return `counts`, and ``queue``, the directory of the samples. States are
        captured from when the first caller ``reads`` them."""
        self._is_read |= reads
        self.flush()
        return {**self.counts, "queue": str(self.writer.directory)}

    def close(self, timeout: float = 5.0) -> None:
        """Store what is waiting and close the writer; what it wrote goes, unless the user named its directory."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)
        self.writer.close(timeout)
        if not self.named:
            self.writer.delete_samples()

    def _batch_of(self, names: list[str], lengths: list[int]) -> Batch:
        """Return the captured requests of a step: the last batch, if nothing has changed since."""
        alike = names, lengths, self.counts["lost"]
        if alike != self._alike:
            running = self._running
            found = [
                running[name] if name in running else self._admit(name)
                for name, _ in zip(names, lengths, strict=True)
            ]
            self._batch, self._alike = Batch(found, lengths, self.window), alike
        return self._batch

    def _is_spent(self, share: float = 1.0) -> bool:
        return 0 < share * self.budget <= self._spent[self.version]

    def _admit(self, name: str) -> Request | None:
        # the prompts of all leave half of the budget to answers
        request = None if self._is_spent(0.5) else Request(name, CaptureWindow(self.window))
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
            self.counts["lost"] += 1

    def _fault(self, error: Exception) -> None:
        if not self.problem:
            logger.warning("hidden states are not captured: %s: %s", type(error).__name__, error)
        self.problem = f"{type(error).__name__}: {error}"

    # -- the recorder's thread -----------------------------------------------------------------------

    def _work(self) -> None:
        last: Any = ()
        while last is not None:
            steps, ended, last = self._collect()
            try:
                if steps:
                    self._store(steps)
            except Exception as error:
                self._fault(error)
                for request in dict.fromkeys(one for step in steps for one in step.batch.requests):
                    self._give_up(request, str(error))
            for request, tokens, prompt in ended:
                pages, request.pages = request.pages, []
                try:
                    self._offer(request, pages, tokens, prompt)
                except Exception as error:
                    self._fault(error)
                    self._give_up(request, str(error))
                    self._buffers.release_pages(pages)
            passed = isinstance(last, threading.Event)
            self._report(now=passed or last is None)
            if passed:
                last.set()

    def _collect(self) -> tuple[list[Step], _Finished, Any]:
        """Return steps to store together, what ended meanwhile, and the last item: an event to set then; None to end."""
        steps: list[Step] = []
        ended: _Finished = []
        size, item = 0, self._queue.get()
        deadline = time.monotonic() + _BATCH_SECONDS
        while item is not None and not isinstance(item, threading.Event):
            if isinstance(item, Step):
                steps.append(item)
                size += item.rows.nbytes
            else:
                ended += item
            if len(steps) >= _BATCH or size >= _BATCH_BYTES:
                break
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
        return steps, ended, item

    def _store(self, steps: list[Step]) -> None:
        try:
            steps[-1].wait()  # copies end in the order in which they began
            self._buffers.file(steps)
        finally:
            for step in steps:
                step.release()

    def _offer(self, request: Request, pages: list[int], tokens: Sequence[int], prompt: int) -> None:
        buffers, total, first = self._buffers, len(tokens), request.window.first
        tokens = tokens[first : first + min(self.window, len(pages) * PAGE)]
        n, last = len(tokens), first + len(tokens) == total
        known = numpy.zeros(n, dtype=bool)
        seen = max(0, n - last)
        if not request.lost and seen:
            ids, places = numpy.array(tokens, dtype=numpy.int64), places_of(pages)[:n]
            versions, same = buffers.versions[places[:seen]], buffers.ids[places[:seen]] == ids[:seen]
            version = int(versions.max())
            known[:seen] = (versions == version) & same & (versions >= 0)
            wrong = (versions >= 0) & ~same
            self.counts["mismatched"] += int(wrong.sum())
            if request.is_cut:  # rows behind a rejected draft, which no later step has replaced
                known[:seen] &= ~numpy.logical_or.accumulate(wrong)
        if not known.any():
            self.counts["empty"] += not request.lost
            buffers.release_pages(pages)
            return
        response = numpy.arange(first, first + n) >= prompt

        def sample() -> Sample:
            """Copy the states, in the writer's thread."""
            facts = {"input_ids": ids, "known": known, "response": response}
            tensors = {name: torch.from_numpy(one) for name, one in facts.items()}
            return Sample(request.name, version=version, **tensors, **buffers.read(places, known))

        self.counts["requests"] += 1
        self.writer.offer(sample, lambda: buffers.release_pages(pages))

    def _report(self, now: bool = False) -> None:
        if self.report is not None and (now or time.monotonic() - self._reported > 1.0):
            self._reported = time.monotonic()
            try:
                self.report({**self.counts, **{f"ring_{name}": n for name, n in self.writer.counts.items()}})
            except Exception as error:
                self._fault(error)


def make_recorder(options: Mapping[str, Any]) -> Recorder:
    """Make the recorder that the family's options describe; it reports to the ledger, beside whose rows its queue is by default."""
    named, beside = options["samples"], files.directory() / files.run_id() / "samples"
    directory = Path(user_directories.expand(named)) if named else beside
    return Recorder(
        SampleWriter(directory),
        options["capture_budget"],
        window=options["capture_window"],
        named=bool(named),
        report=lambda counts: ledger.note(eagle_capture=dict(counts), eagle_samples=str(directory)),
    )
