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

_TRIES = 3
_PAUSE = 0.1  # seconds between two of them


def run_ids(store: Store) -> list[str]:
    """Return the runs in the store, the one published to last at the end. Raises StoreError."""
    found = old_keys.published(store)
    return sorted((run for run in found if keys.is_plain(run)), key=lambda run: found[run])


def fetch(store: Store, run: str, folder: Path) -> int:
    """Bring the directory of a run up to date.

    Args:
        store: where from.
        run: id of the run.
        folder: its directory here; it is made where it is missing.

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
        place = key.removeprefix(prefix)
        for _ in range(_TRIES):
            problems = _fetch_place(store, run, folder, place, indexes.get(key), rows.get(rows_key), known)
            if not problems:
                break
            time.sleep(_PAUSE)  # the place was publishing meanwhile
            indexes.update(store.get([key]))
            rows.update(store.get([rows_key]))
    return len(found)


def _fetch_place(
    store: Store,
    run: str,
    folder: Path,
    place: str,
    packed_index: bytes | None,
    packed_rows: bytes | None,
    known: dict[str, dict[str, Any]],
) -> list[str]:
    """Write one place's files; return sentences that say what is missing."""
    target = folder / node.FOLDER / place
    name = f"{folder.name}/{node.FOLDER}/{place}"
    try:
        if packed_index is None or packed_rows is None:
            raise ValueError("it is not in the store")
        index = keys.unpacked(packed_index)
        if index["format"] != keys.FORMAT:
            raise ValueError(f"it has format {index['format']}, this FlashPatch reads {keys.FORMAT}")
        told = known.get(index["node"])
        index["state"] = node.UNKNOWN if told is None else node.ALIVE if told["alive"] else node.DEAD
        index["fetched"] = time.time()
        node.of(index)
        before = _before(target / node.FILE)
        problems = _write_rows(target, index, packed_rows, before)
        problems += _write_events(store, run, place, target, index, before)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{name} was not fetched: {error!r}"]
    if index["left_out"]:
        index["problems"] = [
            f"{name}: {index['left_out']} rows are not gathered, over {keys.MOST_BYTES >> 20} MiB"
        ]
    else:
        index["problems"] = []
    index["problems"] += [f"{name}: {problem}" for problem in problems]
    files.write_bytes(target / node.FILE, json.dumps(index).encode())
    return problems


def _write_rows(target: Path, index: dict[str, Any], packed: bytes, before: dict[str, Any]) -> list[str]:
    version = zlib.crc32(packed)
    problems = [] if version == index["rows"] else ["its rows changed while they were read"]
    index["rows"] = version
    if before.get("rows") == version:
        return problems
    for name, text in keys.unpacked(packed).items():
        if _is_published(name, ("row", "expect")):
            files.write_bytes(target / name, text.encode())
    return problems


def _write_events(
    store: Store, run: str, place: str, target: Path, index: dict[str, Any], before: dict[str, Any]
) -> list[str]:
    """Write the files of events that changed; of one that cannot be had whole the index says nothing."""
    problems, kept = [], {}
    for name, entry in index["events"].items():
        if not _is_published(name, ("events",)):
            continue
        if before.get("events", {}).get(name) != entry:
            content = _content(store, run, place, name, entry)
            if content is None:
                problems.append(f"{name} changed while it was read")
                continue
            files.write_bytes(target / name, content)
        kept[name] = entry
    index["events"] = kept
    return problems


def _content(store: Store, run: str, place: str, name: str, entry: dict[str, Any]) -> bytes | None:
    """Return a file of events as far as it is stored; None where a chunk is missing."""
    first, size = int(entry["first"]), int(entry["size"])
    last = -(-size // keys.CHUNK)
    if last - first > keys.CHUNKS + 1:
        raise ValueError(f"{name} has {last - first} chunks")
    wanted = [keys.chunk(run, place, name, int(entry["generation"]), number) for number in range(first, last)]
    found = store.get(wanted)
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
