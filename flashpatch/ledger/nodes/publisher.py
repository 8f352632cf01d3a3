"""Publish one run directory in Ray's key-value store: its rows, its events, and which of its processes are alive."""

from __future__ import annotations

import os
import stat
import time
import zlib
from typing import Any

from flashpatch.ledger import files, runs
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.published_events import PublishedEvents
from flashpatch.ledger.nodes.ray_store import Store

HEARTBEAT = 10.0
"""Seconds after which the index is written again though nothing changed: it says who is alive."""

_RUN_HEARTBEAT = 60.0
_NOTHING_STORED = b""


class Publisher:
    """Keep the store as the directory is. What was stored is remembered, so that only changes are written.

    Args:
        store: where to.
        run: id of the run.
        folder: the run's directory on this node.
        node: id of this node; its name and address are asked of Ray once.
    """

    def __init__(self, store: Store, run: str, folder: str, node: str) -> None:
        self.place = keys.place(node, files.host(), folder)
        self._store = store
        self._run = run
        self._folder = folder
        known = store.nodes().get(node, {})
        self._head = {
            "format": keys.FORMAT,
            "run": run,
            "node": node,
            "name": known.get("name", ""),
            "address": known.get("address", ""),
            "host": files.host(),
            "folder": folder,
        }
        self._forget()

    def _forget(self) -> None:
        """Take nothing for stored, as at first."""
        self._texts: dict[str, tuple[tuple[int, int, int], str]] = {}
        self._events: dict[str, PublishedEvents] = {}
        self._rows = _NOTHING_STORED
        self._index: dict[str, Any] = {}
        self._index_time = self._run_time = float("-inf")

    def publish(self) -> None:
        """Write what changed since the last call.

        Raises:
            StoreError: Ray does not answer; the next call writes everything again.
        """
        try:
            self._publish()
        except BaseException:
            self._forget()
            raise

    def _publish(self) -> None:
        entries = self._entries()
        left_out = self._publish_rows(entries)
        renewed = self._publish_events(entries)
        published = {name: one.entry for name, one in sorted(self._events.items()) if one.entry is not None}
        index = {
            **self._head,
            "alive": _alive(entries),
            "rows": zlib.crc32(self._rows),
            "events": published,
            "left_out": left_out,
        }
        now = time.monotonic()
        if index != self._index or now - self._index_time >= HEARTBEAT:
            data = keys.packed({**index, "written": round(time.time(), 3)})
            is_new = self._store.put(keys.index(self._run, self.place), data)
            if is_new and self._index:  # the store was lost, as when Ray's head was started again
                self._forget()
                return
            self._index, self._index_time = index, now
            for one in renewed:
                one.forget_older(self._store)
        if now - self._run_time >= _RUN_HEARTBEAT:
            self._store.put(keys.run(self._run), keys.packed({"written": round(time.time(), 3)}))
            self._run_time = now

    def _entries(self) -> dict[str, os.stat_result]:
        """Return the files that this node has to publish: in a shared directory the others are of other hosts."""
        found, here = {}, files.host()
        for entry in runs.entries(self._folder):
            match = keys.FILE.fullmatch(entry.name)
            if match and (match["kind"] == "expect" or match["host"] == here):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # replaced or removed meanwhile
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found[entry.name] = status
        return found

    def _publish_rows(self, entries: dict[str, os.stat_result]) -> int:
        """Store the rows if one has changed; return how many had no room."""
        changed, size, left_out, texts = False, 0, 0, {}
        for name, status in sorted(entries.items()):
            if name.startswith("events-"):
                continue
            size += status.st_size
            if size > keys.MOST_BYTES:
                left_out += 1
                continue
            version = status.st_ino, status.st_size, status.st_mtime_ns
            before = self._texts.get(name)
            if before is None or before[0] != version:
                text = _text(os.path.join(self._folder, name))
                if text is None:
                    continue
                self._texts[name] = version, text
                changed = True
            texts[name] = self._texts[name][1]
        if changed or not self._rows:
            self._rows = keys.packed(texts)
            self._store.put(keys.rows(self._run, self.place), self._rows)
        return left_out

    def _publish_events(self, entries: dict[str, os.stat_result]) -> list[PublishedEvents]:
        """Store new events; return the files of which another generation is stored now."""
        renewed = []
        for name, status in sorted(entries.items()):
            if not name.startswith("events-"):
                continue
            path = os.path.join(self._folder, name)
            one = self._events.setdefault(name, PublishedEvents(self._run, self.place, path))
            generation = one.entry and one.entry["generation"]
            try:
                one.publish(self._store, status)
            except OSError:  # the file was replaced or removed meanwhile
                continue
            if one.entry is not None and one.entry["generation"] != generation:
                renewed.append(one)
        return renewed


def _alive(entries: dict[str, os.stat_result]) -> list[list[Any]]:
    """Return pid and start of the processes of this host that run."""
    found = []
    for name in sorted(entries):
        match = keys.FILE.fullmatch(name)
        if match and match["kind"] == "row":
            pid, start = int(match["pid"]), match["start"]
            if runs.is_alive(files.host(), pid, "" if start == "unknown" else start):
                found.append([pid, start])
    return found


def _text(path: str) -> str | None:
    """Return a file's text; None if it was replaced or removed meanwhile, or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
