"""Append timestamped events of this process to a bounded file beside its row.

The row holds counts and last values; this file says when something happened. Each process has a file of its own,
``events-<host>-<pid>-<start>.jsonl``, one JSON object a line, so processes never write to the same file, and what a
killed process leaves behind is whole but for its last line. A line has ``n``, the number of the event in this process
from 1, ``t``, seconds since 1970 when it ended, ``event``, its name, and what the caller gave. Samples of a value that
is measured over and over have ``sample``: true.

A file that exceeds ``FLASHPATCH_EVENT_BYTES`` is rewritten in half of that: without every second sample, as often as it
takes, and without the oldest events if few samples are left. Its first line then counts what is gone, under the names of `kind_of`. An event equal to the one before
it within a second is only counted, in ``repeats`` of the next.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

from flashpatch.ledger import files

VARIABLE = "FLASHPATCH_EVENT_BYTES"
DEFAULT_BYTES = 4 << 20
LARGEST_LINE = 16 << 10
"""Bytes; of a longer event only its name and time are written."""

DROPPED = "dropped"
"""Name of the first line of a file that was shortened, with the numbers ``events`` and ``samples`` that are gone."""

_LONGEST_TEXT = 2000  # letters of one text
_REPEAT_SECONDS = 1.0
_FEWEST_SAMPLES = 64  # below which old events go instead
_log = logging.getLogger("flashpatch")


class EventLog:
    """Write one process's events. All methods may be called from any thread, and raise nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._repeats = 0
        self._last: tuple[str, dict[str, Any]] | None = None
        self._last_time = 0.0
        self._torn = False  # whether the last write was cut short, by a full disk
        self.problem: str | None = None

    def append(self, name: str, facts: dict[str, Any], sample: bool = False) -> None:
        """Write one event; ``facts`` are JSON values, others are written as their ``repr``."""
        try:
            largest = limit()
            if largest:
                with self._lock:
                    self._append(name, facts, sample, largest)
        except (OSError, ValueError, TypeError) as error:
            if self.problem is None:
                _log.warning("flashpatch: events of this process are not recorded: %s", error)
            self.problem = str(error)

    def _append(self, name: str, facts: dict[str, Any], sample: bool, largest: int) -> None:
        now = time.time()
        if self._last == (name, facts) and 0 <= now - self._last_time < _REPEAT_SECONDS:
            self._repeats += 1
            return
        self._number += 1
        head: dict[str, Any] = {"n": self._number, "t": round(now, 6), "event": name}
        if sample:
            head["sample"] = True
        if self._repeats:
            head["repeats"] = self._repeats
        line = _line({**head, **_shortened(facts), **head})
        if len(line) > LARGEST_LINE:
            line = _line({**head, "too_long": len(line)})
        self._write(line, largest)
        self._last, self._last_time, self._repeats = (name, facts), now, 0

    def _write(self, line: bytes, largest: int) -> None:
        path = event_path()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            files.make_private(os.path.dirname(path))
            file = os.open(path, flags, 0o600)
        try:
            size = os.fstat(file).st_size
            line = b"\n" + line if self._torn else line
            self._torn = os.write(file, line) != len(line)
        finally:
            os.close(file)
        if size + len(line) > largest:
            _shorten(path, largest // 2)


def event_path() -> str:
    """The file of this process's events."""
    folder, name = os.path.split(files.row_path())
    return os.path.join(folder, f"events-{name.removeprefix('row-')}l")


def limit() -> int:
    """Return ``FLASHPATCH_EVENT_BYTES``; 0 switches events off.

    Raises:
        ValueError: it is no whole number of at least 0.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{VARIABLE}={text!r} is not a whole number of at least 0")
    return int(text) if text else DEFAULT_BYTES


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line of this process; None if it is none. Who reads other processes' takes `schema.event`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, default=repr, separators=(",", ":")).encode() + b"\n"


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for key, value in facts.items()
        if value is not None
    }


def _shorten(path: str, target: int) -> None:
    """Rewrite a file of events in at most ``target`` bytes, or its newest event."""
    with open(path, "rb") as file:
        lines = file.readlines()
    gone: dict[str, Any] = {"events": 0, "samples": 0, "by": {}}
    kept: list[tuple[bytes, bool]] = []
    for line in lines:
        event = parsed(line)
        if event is None:
            continue
        if event["event"] == DROPPED:
            count_dropped(gone, line)
            continue
        kept.append((line, bool(event.get("sample"))))
    while _size(kept) > target and sum(is_sample for _, is_sample in kept) > _FEWEST_SAMPLES:
        fewer = _thinned(kept)
        gone["samples"] += len(kept) - len(fewer)
        kept = fewer
    size, first = _size(kept), 0
    while size > target and first < len(kept) - 1:
        line, _ = kept[first]
        count_dropped(gone, line)
        size, first = size - len(line), first + 1
    header = _line({"n": 0, "t": round(time.time(), 6), "event": DROPPED, **gone})
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as out:
            out.write(header + b"".join(line for line, _ in kept[first:]))
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def count_dropped(gone: dict[str, Any], line: bytes) -> None:
    """Add a line that is not kept to ``events``, ``samples`` and ``by`` of ``gone``; a header's numbers replace them."""
    event = parsed(line)
    if event is None:
        return
    if event["event"] == DROPPED:
        gone.update({kind: event[kind] for kind in ("events", "samples", "by") if kind in event})
    elif event.get("sample"):
        gone["samples"] += 1
    else:
        gone["events"] += 1
        kind = kind_of(event)
        gone["by"][kind] = gone["by"].get(kind, 0) + 1


def kind_of(event: dict[str, Any]) -> str:
    """Return the name under which dropped events are counted: the event's, with its outcome if it has one."""
    return f"{event['event']}/{event['outcome']}" if "outcome" in event else event["event"]


def _size(lines: list[tuple[bytes, bool]]) -> int:
    return sum(len(line) for line, _ in lines)


def _thinned(lines: list[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
    """Return lines without every second one that is a sample."""
    kept, odd = [], False
    for line, is_sample in lines:
        odd = odd ^ is_sample
        if not (is_sample and odd):
            kept.append((line, is_sample))
    return kept


log = EventLog()


def _after_fork() -> None:
    global log
    log = EventLog()


os.register_at_fork(after_in_child=_after_fork)
