"""Publish one run directory in Ray's key-value store: its rows, the ends of its events, which of its processes are alive."""

from __future__ import annotations

import os
import stat
import time
from typing import Any

from flashpatch.ledger import events, files, runs
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.ray_store import Store

HEARTBEAT = 10.0
"""Seconds after which everything is written again, whether it has changed or not; changed rows are at each call, and
everything if there is a new file of events."""

_EVENT_BYTES = 256 << 10  # of the end of a process's events, and of its samples; fewer if they are many
_MOST_EVENT_BYTES = 32 << 20  # of all


class Publisher:
    """Write one place.

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
            "node": node,
            "name": known.get("name", ""),
            "address": known.get("address", ""),
            "host": files.host(),
        }
        self._stored: Any = None
        self._logs: list[str] = []
        self._time = float("-inf")

    def publish(self, whole: bool = False) -> None:
        """Write rows that changed since the last call; everything if it is ``whole`` or time for it. Raises StoreError."""
        entries = self._entries()
        rows = {name: found for name, found in entries.items() if name.startswith(("row-", "expect-"))}
        alive = _alive(rows)
        state = (
            alive,
            {name: (found.st_ino, found.st_size, found.st_mtime_ns) for name, found in rows.items()},
        )
        now = time.monotonic()
        logs = [name for name in entries if name not in rows]
        whole = whole or now - self._time >= HEARTBEAT or logs != self._logs
        if whole:
            self._logs, ends = logs, self._ends(logs)
            self._store.put(keys.events(self._run, self.place), keys.packed(ends))
            self._time = now
        if whole or state != self._stored:
            written = {"written": round(time.time(), 3)}
            texts, left_out = self._texts(rows)
            index = {**self._head, **written, "alive": alive, "left_out": left_out, "rows": texts}
            self._store.put(keys.rows(self._run, self.place), keys.packed(index))
            self._store.put(keys.run(self._run), keys.packed(written))
            self._stored = state

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
        return dict(sorted(found.items()))

    def _texts(self, rows: dict[str, os.stat_result]) -> tuple[dict[str, str], int]:
        """Return the text of each file, and how many had no room."""
        texts, size, left_out = {}, 0, 0
        for name, status in rows.items():
            size += status.st_size
            if size > keys.MOST_BYTES:
                left_out += 1
            elif text := _end(os.path.join(self._folder, name), keys.MOST_BYTES):
                texts[name] = text.decode(errors="replace")
        return texts, left_out

    def _ends(self, names: list[str]) -> dict[str, str]:
        """Return the newest events of each process and kind, from a line on that counts those before."""
        most = min(_EVENT_BYTES, _MOST_EVENT_BYTES // max(len(names), 1))
        found = {}
        for name in names:
            path = os.path.join(self._folder, name)
            if name.endswith(events.OLD):
                continue
            before = _end(f"{path.removesuffix('.jsonl')}{events.OLD}", most)
            content = (before + _end(path, most))[-most:]
            found[name] = content[max(content.find(events.MARK), 0) :].decode(errors="replace")
        return found


def _alive(rows: dict[str, os.stat_result]) -> list[list[Any]]:
    """Return pid and start of the processes of this host that run."""
    found = []
    for name in rows:
        match = keys.FILE.fullmatch(name)
        if match and match["kind"] == "row":
            pid, start = int(match["pid"]), match["start"]
            if runs.is_alive(files.host(), pid, "" if start == "unknown" else start):
                found.append([pid, start])
    return found


def _end(path: str, most: int) -> bytes:
    """Return the last bytes of a file; none if it was replaced or removed meanwhile, or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
            return file.read(most)
    except OSError:
        return b""
