"""Copy what the nodes of a run published in Ray's key-value store into the run's directory here.

A place comes into ``nodes/<place>/`` of the run directory, see `flashpatch.ledger.nodes.node`. It stays there when the
node, or the whole cluster, is gone. Only what changed since the last time is fetched.
"""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

from flashpatch.ledger import events, files
from flashpatch.ledger.nodes import keys, node, old_keys
from flashpatch.ledger.nodes.ray_store import Store

_PAUSES = (0.1, 0.3, 0.0)
"""Seconds after each attempt to read a place of which not all is of one moment."""

_READ = 60.0  # seconds that a reader may take from the file about the nodes to their rows


def run_ids(store: Store) -> list[str]:
    """Return the runs in the store, the one published to last at the end. Raises StoreError."""
    found = old_keys.published(store)
    return sorted((run for run in found if keys.is_plain(run)), key=lambda run: found[run])


def fetch(store: Store, run: str, folder: Path, here: str = "") -> int:
    """Bring the directory of a run up to date.

    Args:
        store: where from.
        run: id of the run.
        folder: its directory here; it is made if it is missing.
        here: the place that this directory is, of which no file is copied.

    Returns:
        The number of places that published.

    Raises:
        StoreError: Ray does not answer.
        OSError: the directory cannot be written.
    """
    prefix = keys.index(run)
    found = [key for key in store.keys(prefix) if keys.is_plain(key.removeprefix(prefix))]
    known = store.nodes()
    indexes = store.get(found)
    before = _before(folder)
    now = dict(before)
    for key in found:
        name = key.removeprefix(prefix)
        place = _Place(store, run, folder, name, before.get(name, {}), is_here=name == here)
        for pause in _PAUSES:
            now[name], is_whole = place.fetched(indexes.get(key), known)
            if is_whole:
                break
            time.sleep(pause)  # it was publishing meanwhile
            indexes.update(store.get([key]))
    if found:
        files.write_bytes(folder / node.FOLDER / node.FILE, json.dumps(now).encode())
    return len(found)


class _Place:
    """One place of a run, and its directory here."""

    def __init__(
        self, store: Store, run: str, folder: Path, place: str, before: dict[str, Any], is_here: bool
    ) -> None:
        self._store = store
        self._run = run
        self._place = place
        self._before = before
        self._is_here = is_here
        self._folder = folder / node.FOLDER / place
        self._name = f"{folder.name}/{node.FOLDER}/{place}"

    def fetched(self, packed: bytes | None, known: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Write its files; return what is known of it now, and whether all that was read is of one moment."""
        try:
            index = keys.unpacked(packed or b"")
            if index["format"] != keys.FORMAT:
                raise ValueError(f"format {index['format']}, this FlashPatch reads {keys.FORMAT}")
            told = known.get(index["node"])
            index["state"] = node.UNKNOWN if told is None else node.ALIVE if told["alive"] else node.DEAD
            index["fetched"] = time.time()
            index["here"] = self._is_here
            node.of(index)
            problems = [] if self._is_here else [*self._write_rows(index), *self._write_events(index)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            index, problems = dict(self._before), [f"what was published cannot be read: {error!r}"]
        told_of = list(problems)
        if index.get("left_out"):
            told_of.append(f"{index['left_out']} rows are not gathered, over {keys.MOST_BYTES >> 20} MiB")
        index["problems"] = [f"{self._name}: {problem}" for problem in told_of]
        return index, not problems

    def _write_rows(self, index: dict[str, Any]) -> list[str]:
        """Write the rows if they changed, and remove older ones; return sentences that say what is missing."""
        path = self._folder / node.rows_name(index["rows"])
        if self._before.get("rows") == index["rows"] and path.exists():
            return []
        packed = self._store.get([keys.rows(self._run, self._place)]).get(keys.rows(self._run, self._place))
        if packed is None:
            return ["its rows are not in the store"]
        index["rows"] = zlib.crc32(packed)  # they may be newer than the index, which is no harm
        files.write_bytes(self._folder / node.rows_name(index["rows"]), packed)
        recent = {node.rows_name(int(found["rows"])) for found in (self._before, index) if "rows" in found}
        for old in self._folder.glob("rows-*.z"):
            if old.name not in recent and time.time() - old.stat().st_mtime > _READ:
                old.unlink(missing_ok=True)
        return []

    def _write_events(self, index: dict[str, Any]) -> list[str]:
        """Write the files of events that changed; return sentences that say what is missing."""
        kept, problems = {}, []
        for name, entry in index["events"].items():
            if not _is_events_file(name):
                continue
            if self._before.get("events", {}).get(name) != entry:
                content = self._content(name, entry)
                if content is None:
                    problems.append(f"{name} changed while it was read")
                    continue
                files.write_bytes(self._folder / name, content)
            kept[name] = entry
        index["events"] = kept
        return problems

    def _content(self, name: str, entry: dict[str, Any]) -> bytes | None:
        """Return a file of events as far as it is stored; None if a chunk is missing."""
        first, size, generation = (int(entry[field]) for field in ("first", "size", "generation"))
        last = -(-size // keys.CHUNK)
        if last - first > keys.CHUNKS + 1:
            raise ValueError(f"{name} has {last - first} chunks")
        wanted = [keys.chunk(self._run, self._place, name, generation, n) for n in range(first, last)]
        found = self._store.get(wanted)
        if len(found) < len(wanted):
            return None
        content = b"".join(keys.inflated(found[key], keys.CHUNK) for key in wanted)
        if len(content) < size - first * keys.CHUNK:
            return None
        if not first:
            return content
        gone = {kind: entry["gone"][kind] for kind in ("events", "samples", "by")}
        header = {"n": 0, "t": time.time(), "event": events.DROPPED, **gone}
        return json.dumps(header).encode() + b"\n" + content.partition(b"\n")[2]


def _is_events_file(name: str) -> bool:
    match = keys.FILE.fullmatch(name)
    return match is not None and match["kind"] == "events" and keys.is_plain(name)


def _before(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what was fetched the last time; nothing if it cannot be read."""
    try:
        return node.indexes(folder)
    except (OSError, ValueError):
        return {}
