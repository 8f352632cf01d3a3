"""Say what a node publishes in Ray's key-value store, which runs are there, and remove old ones.

The store is memory of Ray's head node and lives as long as the cluster, so fewer runs are kept than on disk. A run that
was published to within the last ten minutes stays."""

from __future__ import annotations

import logging
import os
import time

from flashpatch.ledger import events, files, old_runs, runs
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.ray_store import Store

MOST_RUNS = 20
_DAY = 86400.0
_RECENT = 600.0  # seconds
_EVENT_BYTES = 256 << 10  # of the end of a process's events, and of its samples; fewer if they are many
_MOST_EVENT_BYTES = 32 << 20  # of all


def publish(store: Store, run: str, folder: str, node: str) -> None:
    """Write what is in a run's directory on this node, and when that was. Raises StoreError."""
    store.put(keys.of_place(run, keys.place(node, files.host(), folder)), snapshot(folder, node))
    store.put(keys.of_run(run), keys.packed({"written": round(time.time(), 3)}))


def snapshot(folder: str, node: str) -> bytes:
    """Return the rows in a directory, the ends of its events, and which of its processes are alive, packed.

    In a directory that several hosts share, each publishes the files of its own processes."""
    rows: dict[str, str] = {}
    alive, logs, room, left_out = [], list[str](), keys.MOST_BYTES, 0
    for entry in sorted(runs.entries(folder), key=lambda entry: entry.name):
        of = keys.FILE.fullmatch(entry.name)
        if of is None or (of["host"] != files.host() and of["kind"] != "expect"):
            continue
        if of["kind"] in ("events", "samples"):
            logs.append(entry.path)
            continue
        if of["kind"] == "row" and runs.is_alive_by_name(of):
            alive.append((int(of["pid"]), of["start"]))
        try:
            content = files.load_bytes(entry.path, min(room, runs.LARGEST))[0]
        except (OSError, ValueError):  # not ours to read, or too large
            left_out += 1
            continue
        room -= len(content)
        rows[entry.name] = content.decode(errors="replace")
    told = {"node": node, "host": files.host(), "written": round(time.time(), 3), "alive": alive}
    return keys.packed({**told, "rows": rows, "left_out": left_out, "events": _ends(logs)})


def _ends(paths: list[str]) -> dict[str, str]:
    """Return the newest events of each process and kind, from a line on that counts those before."""
    most = min(_EVENT_BYTES, _MOST_EVENT_BYTES // max(len(paths), 1))
    found = {}
    for path in paths:
        if not path.endswith(events.OLD):
            before = f"{path.removesuffix('.jsonl')}{events.OLD}"
            content = (_end(before, most) + _end(path, most))[-most:]
            text = content[max(content.find(events.MARK), 0) :].decode(errors="replace")
            found[os.path.basename(path)] = text
    return found


def _end(path: str, most: int) -> bytes:
    """Return the last bytes of a file; none if it was replaced or removed meanwhile, or cannot be read."""
    try:
        return files.load_bytes(path, most, end=True)[0]
    except (OSError, ValueError):
        return b""


def run_ids(store: Store) -> list[str]:
    """Return the runs in the store, the one published to last at the end. Raises StoreError."""
    found = _written(store)
    return sorted(filter(keys.is_plain, found), key=lambda run: found[run])


def prune(store: Store, present: str) -> list[str]:
    """Remove runs as the environment says: those last published to too long ago, and all but the newest, at most `MOST_RUNS`.

    The run ``present`` stays, and counts as the newest. Return the ids of those that were removed. Raises StoreError."""
    try:
        days, most = old_runs.limits()
    except ValueError as error:
        logging.getLogger("flashpatch").warning("flashpatch: old runs are not removed from Ray: %s", error)
        return []
    found, now = _written(store), time.time()
    others = sorted(found.keys() - {present}, key=lambda run: found[run], reverse=True)
    surplus = others[min(most or MOST_RUNS, MOST_RUNS) - 1 :]
    old = [run for run in others if days and now - found[run] > days * _DAY]
    gone = [run for run in others if run in {*surplus, *old} and now - found[run] > _RECENT]
    for run in gone:
        store.delete(keys.of_place(run), prefix=True)
        store.delete(keys.of_run(run))
    return gone


def _written(store: Store) -> dict[str, float]:
    """Return the runs in the store, each with when a node last published for it, seconds since 1970."""
    found = {}
    for key, value in store.get(store.keys(keys.of_run())).items():
        try:
            found[key.removeprefix(keys.of_run())] = float(keys.unpacked(value)["written"])
        except (ValueError, KeyError, TypeError):
            continue  # not ours, or of another format
    return found
