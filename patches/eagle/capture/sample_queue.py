"""Pass samples to a trainer in another process: a bounded queue of files in one directory.

A sample is written under a hidden name and renamed when it is whole, so a reader sees whole files only,
whenever either side is killed. A reader claims a file by renaming it, so two readers never get the same one.
When the queue is full the oldest sample is dropped: a slow or dead reader costs samples, never tokens.

Nodes may share the directory. Names hold the host and a random part, and what a killed process left is known by its age,
since a process id says nothing on another node. The directory is this user's, with mode 0700, and no link."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch import user_directories
from flashpatch.errors import PatchError
from flashpatch.ledger.files import make_private
from flashpatch.patches._shared.atomic_file import replacing

if TYPE_CHECKING:
    from flashpatch.patches.eagle.capture.sample import Sample

    Offered = Sample | Callable[[], Sample]

logger = logging.getLogger("flashpatch.eagle")

_SAMPLE = re.compile(r"\d{20}-[\w.]+-\d+\.safetensors")
_PARTIAL = re.compile(r"\.(?:write-|take-|tmp).*")  # being written or read; .tmp: by safetensors 0.8
LEFT_SECONDS = 3600.0
"""Age at which a file that is being written or read counts as left by a killed process. Writing and reading take seconds;
nodes' clocks differ by minutes at most."""


class SampleWriter:
    """Write samples to the queue. Any number of writers may share a directory; the bounds hold for all of it, but for what more
    than eight writers add before they look again: each takes an eighth of what it found free.

    Args:
        directory: made if missing, readable by its owner only.
        slots: most samples in the directory.
        bytes: most bytes in the directory.
        waiting: most samples offered and not yet written; more are dropped.

    Attributes:
        counts: ``offered``, ``written``, ``dropped`` (the writer could not keep up), ``failed`` (could not be
            written) and ``evicted`` (dropped unread for a newer one).
        problem: why the last write failed, or ""."""

    def __init__(
        self, directory: str | os.PathLike[str], slots: int = 1024, bytes: int = 1 << 30, waiting: int = 1024
    ) -> None:
        self.directory, self.slots, self.bytes = Path(directory), slots, bytes
        self.counts: Counter[str] = Counter(offered=0, written=0, dropped=0, failed=0, evicted=0)
        self.problem = ""
        self._pid, self._name = os.getpid(), _unique()
        self._sequence = 0
        self._free_slots = self._free_bytes = 0  # known to be free for this writer
        self._sizes: dict[str, int] = {}  # bytes of the samples that were there when the directory was listed
        self._queue: queue.Queue[tuple[Offered, Callable[[], None] | None] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._closed = False

    def offer(self, sample: Offered, release: Callable[[], None] | None = None) -> bool:
        """Offer a sample; return False when it was dropped. Never blocks, never raises.

        Args:
            sample: its tensors must stay as they are until ``release``; or what makes it, in the writer's thread.
            release: called once the sample's memory may be used again, from any thread, also when it is
            dropped."""
        self.counts["offered"] += 1
        try:
            if self._closed or os.getpid() != self._pid:
                raise queue.Full
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="flashpatch-samples", daemon=True)
                self._thread.start()
            self._queue.put_nowait((sample, release))
        except Exception as error:  # full; or no thread can be started: the interpreter is shutting down
            self.counts["dropped"] += 1
            if not isinstance(error, queue.Full):
                self._fault(error)
            _call(release)
            return False
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Write what is waiting, for at most ``timeout`` seconds, and stop. Never raises."""
        self._closed = True
        if self._thread is None or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def delete_samples(self) -> None:
        """Delete what this writer has written and nobody has read, and the directory if that was all of it. Never raises."""
        with contextlib.suppress(OSError):
            for file in self.directory.glob(f"*-{self._name}-*"):
                file.unlink(missing_ok=True)
            self.directory.rmdir()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            sample, release = item
            try:
                self._write(sample() if callable(sample) else sample)
                self.counts["written"] += 1
                self.problem = ""
            except Exception as error:  # disk full, directory gone, a tensor that cannot be written
                self.counts["failed"] += 1
                self._fault(error)
            finally:
                del sample, item
                _call(release)

    def _write(self, sample: Sample) -> None:
        size = sample.bytes + 1024
        if size > self.bytes:
            raise ValueError(f"a sample of {size} bytes does not fit into a queue of {self.bytes}")
        make_private(str(self.directory))
        user_directories.check_private(str(self.directory))
        self._make_room(size)
        temporary = self.directory / f".write-{self._name}-{self._sequence}"
        final = self.directory / f"{time.time_ns():020d}-{self._name}-{self._sequence}.safetensors"
        self._sequence += 1
        with replacing(final, temporary):
            sample.save(temporary)

    def _make_room(self, size: int) -> None:
        """Delete the oldest samples, and what killed processes left. Few calls list the directory, and none asks twice for a
        sample's size; for that, a full queue loses an eighth of its samples at once."""
        self._free_slots -= 1
        self._free_bytes -= size
        if self._free_slots > 0 and self._free_bytes > 0:
            return
        found: dict[str, int] = {}
        total, oldest = size, time.time() - LEFT_SECONDS
        for entry in os.scandir(self.directory):
            if entry.name in self._sizes:
                found[entry.name] = self._sizes[entry.name]
                continue
            with contextlib.suppress(FileNotFoundError):
                if _SAMPLE.fullmatch(entry.name):
                    found[entry.name] = entry.stat().st_size
                elif _PARTIAL.fullmatch(entry.name) and entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
                else:
                    total += entry.stat().st_size
        total += sum(found.values())
        by_age = sorted(found)
        evicted = len(found) // 8 if len(found) >= self.slots or total > self.bytes else 0
        while by_age and (evicted > 0 or len(found) >= self.slots or total > self.bytes):
            name, evicted = by_age.pop(0), evicted - 1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / name)
                self.counts["evicted"] += 1
            total -= found.pop(name)
        self._sizes = found
        # Other engines may write to the same queue: an eighth of what is free is used before it is listed again.
        self._free_slots, self._free_bytes = (self.slots - len(found)) // 8, (self.bytes - total) // 8

    def _fault(self, error: Exception) -> None:
        if not self.problem:
            logger.warning("captured samples are lost: %s", error)
        self.problem = f"{type(error).__name__}: {error}"


class SampleReader:
    """Read samples from the queue. A directory that does not exist yet is empty.

    Args:
        directory: as the writers'.

    Attributes:
        counts: ``read``, ``corrupt`` (deleted unread) and ``missed`` (dropped, or another reader was first)."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.counts: Counter[str] = Counter(read=0, corrupt=0, missed=0)
        self._name = _unique()
        self._refused = False

    def read_samples(self, limit: int) -> list[Sample]:
        """Remove up to ``limit`` samples from the queue and return them, oldest first."""
        found = map(self._read_sample, self.waiting())
        return list(islice((one for one in found if one is not None), limit))

    def waiting(self) -> list[str]:
        """Return the names of samples, oldest first; none, and a warning, if others may write to the directory."""
        try:
            names = os.listdir(self.directory)
            user_directories.check_private(str(self.directory), forbidden=0o022)
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self._refused:
                logger.warning("no samples are read: %s", error)
            self._refused = True
            return []
        return sorted(name for name in names if _SAMPLE.fullmatch(name))

    def _read_sample(self, name: str) -> Sample | None:
        from flashpatch.patches.eagle.capture.sample import Sample

        claimed = self.directory / f".take-{self._name}-{threading.get_ident()}-{name}"
        try:
            os.rename(self.directory / name, claimed)
        except FileNotFoundError:
            self.counts["missed"] += 1
            return None
        try:
            sample = Sample.load(claimed)
        except PatchError as error:
            self.counts["corrupt"] += 1
            logger.warning("%s", error)
            return None
        finally:
            with contextlib.suppress(OSError):
                claimed.unlink(missing_ok=True)
        self.counts["read"] += 1
        return sample


def _call(release: Callable[[], None] | None) -> None:
    if release is not None:
        with contextlib.suppress(Exception):
            release()


def _unique() -> str:
    """Return a part of file names that no other process has, on whatever node: host, process id, a random number."""
    host = re.sub(r"\W", "_", socket.gethostname(), flags=re.ASCII)[:40]
    return f"{host}.{os.getpid()}.{secrets.token_hex(4)}"
