"""Copy what the nodes of a run published in Ray's key-value store into the run's directory here.

A place comes into ``nodes/<place>/`` of the run directory, with the files that it has on its node. They stay there when
the node, or the whole cluster, is gone. Only what changed since the last time is fetched.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from flashpatch.ledger import events, files
from flashpatch.ledger.nodes import keys, node, old_keys
from flashpatch.ledger.nodes.ray_store import Store

_PAUSES = (0.1, 0.3, 0.0)
"""Seconds after each attempt to read a place of which not all is of one moment."""


def run_ids(store: Store) -> list[str]:
    """Return the runs in the store, the one published to last at the end. Raises StoreError."""
    found = old_keys.published(store)
    return sorted((run for run in found if keys.is_plain(run)), key=lambda run: found[run])


def fetch(store: Store, run: str, folder: Path, here: str = "") -> int:
    """Bring the directory of a run up to date.

    Args:
        store: where from.
        run: id of the run.
        folder: its directory here; it is made where it is missing.
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
    wanted = [keys.rows(run, key.removeprefix(prefix)) for key in found]
    rows = store.get(wanted)
    for key, rows_key in zip(found, wanted, strict=True):
        place = _Place(store, run, folder, key.removeprefix(prefix), here)
        for pause in _PAUSES:
            if place.write(indexes.get(key), rows.get(rows_key), known):
                break
            time.sleep(pause)  # it was publishing meanwhile
            indexes.update(store.get([key]))
            rows.update(store.get([rows_key]))
    return len(found)


class _Place:
    """One place of a run, and its directory here."""

    def __init__(self, store: Store, run: str, folder: Path, place: str, here: str) -> None:
        self._store = store
        self._run = run
        self._place = place
        self._is_here = place == here
        self._folder = folder / node.FOLDER / place
        self._name = f"{folder.name}/{node.FOLDER}/{place}"

    def write(self, packed_index: bytes | None, rows: bytes | None, known: dict[str, dict[str, Any]]) -> bool:
        """Write its files; return whether what was read is of one moment."""
        try:
            if packed_index is None or rows is None:
                return False
            index = keys.unpacked(packed_index)
            if index["format"] != keys.FORMAT:
                raise ValueError(f"format {index['format']}, this FlashPatch reads {keys.FORMAT}")
            told = known.get(index["node"])
            index["state"] = node.UNKNOWN if told is None else node.ALIVE if told["alive"] else node.DEAD
            index["fetched"] = time.time()
            index["here"] = self._is_here
            node.of(index)
            is_whole = index["rows"] == zlib.crc32(rows)  # else the rows are newer than the index
            problems = [] if self._is_here else self._write_files(index, rows)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            index, is_whole = _before(self._folder / node.FILE), False
            problems = [f"what was published cannot be read: {error!r}"]
        told_of = list(problems)
        if index.get("left_out"):
            told_of.append(f"{index['left_out']} rows are not gathered, over {keys.MOST_BYTES >> 20} MiB")
        index["problems"] = [f"{self._name}: {problem}" for problem in told_of]
        files.write_bytes(self._folder / node.FILE, json.dumps(index).encode())
        return is_whole and not problems

    def _write_files(self, index: dict[str, Any], rows: bytes) -> list[str]:
        """Write rows and events that changed; return sentences that say what is missing."""
        before = _before(self._folder / node.FILE)
        index["rows"] = zlib.crc32(rows)
        if before.get("rows") != index["rows"]:
            for name, text in keys.unpacked(rows).items():
                if _is_published(name, ("row", "expect")):
                    files.write_bytes(self._folder / name, text.encode())
        kept, problems = {}, []
        for name, entry in index["events"].items():
            if not _is_published(name, ("events",)):
                continue
            if before.get("events", {}).get(name) != entry:
                content = self._content(name, entry)
                if content is None:
                    problems.append(f"{name} changed while it was read")
                    continue
                files.write_bytes(self._folder / name, content)
            kept[name] = entry
        index["events"] = kept
        return problems

    def _content(self, name: str, entry: dict[str, Any]) -> bytes | None:
        """Return a file of events as far as it is stored; None where a chunk is missing."""
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


def _is_published(name: str, kinds: tuple[str, ...]) -> bool:
    match = keys.FILE.fullmatch(name)
    return bool(match) and keys.is_plain(name) and match is not None and match["kind"] in kinds


def _before(path: Path) -> dict[str, Any]:
    """Return what was fetched the last time; nothing where it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
