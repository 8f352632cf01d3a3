"""Append timestamped events of this process to bounded files beside its row.

The row holds counts and last values; these files say when something happened. Each process has files of its own,
``events-<host>-<pid>-<start>.jsonl`` and, for samples of a value that is measured over and over, ``samples-...``, one
JSON object a line, so processes never write to the same file, and what a killed process leaves behind is whole but for
its last line. A line has ``n``, the number of the event in this process from 1, ``t``, seconds since 1970 when it ended,
``event``, its name, and what the caller gave; a sample has ``sample``: true.

A file that has half of ``FLASHPATCH_EVENT_BYTES`` is renamed to ``...old.jsonl``, in place of the one before. Each begins
with a line that counts what the process wrote before, under the names of `kind_of`, and has another every `_MARKED`
bytes, so whoever has the end of a file knows what is missing. An event equal to the one before it within a second is only counted, in ``repeats`` of the next.
Events that came while the file system did not answer, and too many waited already, are counted in ``lost`` of the next."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from typing import Any

from flashpatch.ledger import files
from flashpatch.ledger.writer import writer

VARIABLE = "FLASHPATCH_EVENT_BYTES"
DEFAULT_BYTES = 4 << 20
LARGEST_LINE = 16 << 10
"""Bytes; of a longer event only its name and time are written."""

DROPPED = "dropped"
"""Name of a line that counts, in ``events`` or ``samples`` and in ``by``, what was written before it."""

MARK, OLD = b'{"n":0,', ".old.jsonl"
"""How such a line begins, and how the name of the older file ends."""

_MARKED = 64 << 10

_LONGEST_TEXT = 2000  # letters of one text
_REPEAT_SECONDS = 1.0
_LONG = 10.0  # seconds without an answer, after which it is said
_log = logging.getLogger("flashpatch")


class EventLog:
    """Write one process's events. All methods may be called from any thread, and raise nothing."""

    def __init__(self) -> None:
        self._losses = itertools.count(1)
        self._lost = self._told = self._number = self._repeats = 0
        self._last: tuple[str, dict[str, Any]] | None = None
        self._last_time = 0.0
        self._events, self._samples = _Files("events"), _Files("samples")
        self.problem: str | None = None

    def append(self, name: str, facts: dict[str, Any], sample: bool = False) -> None:
        """Write one event; ``facts`` are JSON values, others are written as their ``repr``."""
        now = time.time()
        if not writer.do(lambda: self._write(name, facts, sample, now)):
            self._lost = next(self._losses)
            self._say("the file system of the ledger does not answer, and too many wait. They are counted")
        elif (since := writer.hangs) and time.monotonic() - since > _LONG:
            self._say("the file system of the ledger does not answer. They wait")

    def _write(self, name: str, facts: dict[str, Any], sample: bool, now: float) -> None:
        try:
            self._append(name, facts, sample, now)
        except Exception as error:  # of a value's own repr, too
            self._say(str(error) or repr(error))

    def _say(self, problem: str) -> None:
        if self.problem is None:
            _log.warning("flashpatch: events of this process are not recorded: %s", problem)
        self.problem = problem

    def _append(self, name: str, facts: dict[str, Any], sample: bool, now: float) -> None:
        largest = limit()
        if not largest:
            return
        if self._last == (name, facts) and 0 <= now - self._last_time < _REPEAT_SECONDS:
            self._repeats += 1
            return
        self._number += 1
        head: dict[str, Any] = {"n": self._number, "t": round(now, 6), "event": name}
        if sample:
            head["sample"] = True
        if self._repeats:
            head["repeats"] = self._repeats
        lost = self._lost
        if lost > self._told:
            head["lost"] = lost - self._told
        short = {
            key: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for key, value in facts.items()
            if value is not None
        }
        line = _line({**head, **short, **head})
        if len(line) > LARGEST_LINE:
            line = _line({**head, "too_long": len(line)})
        (self._samples if sample else self._events).append(line, kind_of({**facts, "event": name}), largest)
        self._last, self._last_time, self._repeats = (name, facts), now, 0
        self._told = lost


class _Files:
    """The lines of one kind, in the file that they are appended to and the one before it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._counts = Counter[str]()
        self._is_torn = False  # the last write was cut short, by a full disk

    def append(self, line: bytes, name: str, largest: int) -> None:
        path = event_path(self._kind)
        file = _opened(path)
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > largest // 2:
                os.replace(path, f"{path.removesuffix('.jsonl')}{OLD}")
                os.close(file)
                file, size = _opened(path), 0
            if not size or size // _MARKED != (size + len(line)) // _MARKED:
                counts = {self._kind: self._counts.total(), "by": self._counts}
                line = _line({"n": 0, "t": round(time.time(), 6), "event": DROPPED, **counts}) + line
            line = b"\n" + line if self._is_torn else line
            self._is_torn = os.write(file, line) != len(line)
            self._counts[name] += 1
        finally:
            os.close(file)


def event_path(kind: str = "events") -> str:
    """The file of this process's events, or of its samples."""
    folder, name = os.path.split(files.row_path())
    return os.path.join(folder, f"{kind}-{name.removeprefix('row-')}l")


def limit() -> int:
    """Return ``FLASHPATCH_EVENT_BYTES``; 0 switches events off. Raises ValueError if it is no whole number of at least 0."""
    text = os.environ.get(VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{VARIABLE}={text!r} is not a whole number of at least 0")
    return int(text) if text else DEFAULT_BYTES


def kind_of(event: dict[str, Any]) -> str:
    """Return the name under which dropped events are counted: the event's, with its outcome if it has one."""
    return f"{event['event']}/{event['outcome']}" if "outcome" in event else event["event"]


def _opened(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        files.make_private(os.path.dirname(path))
        return os.open(path, flags, 0o600)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, default=repr, separators=(",", ":")).encode() + b"\n"


log = EventLog()


def _after_fork() -> None:
    global log
    log = EventLog()


os.register_at_fork(after_in_child=_after_fork)
