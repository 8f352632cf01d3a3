"""Read what was fetched from the nodes of a run: what each is called, whether it is alive, which of its processes are."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpatch.ledger import files, schema
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.ray_store import Store

FOLDER, FILE = "nodes", "nodes.json"
"""The directory in a run directory, and the file in it, that hold what was fetched: one file, since replacing many takes
seconds on a busy disk."""

ALIVE, DEAD, UNKNOWN = "alive", "dead", "unknown"

_STALE = 30.0  # seconds from a place's last word to the look at it
_OLD = 60.0  # seconds from the look at it to now
_LARGEST = 1 << 30  # bytes of FILE
_BROKEN = (*schema.BROKEN, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Node:
    """Hold what was known of a node when its ledger was fetched.

    Attributes:
        id: Ray's id, hexadecimal.
        name: Ray's name for it; its address if none was given.
        address: its IP address.
        host: the name of the host.
        state: ``alive``, ``dead`` or ``unknown``, as Ray said.
        written: when it last published, by its own clock, seconds since 1970.
        fetched: when that was read, likewise.
        running: pid and start of its processes that ran."""

    id: str
    name: str
    address: str
    host: str
    state: str
    written: float
    fetched: float
    running: tuple[tuple[int, str], ...]

    @property
    def label(self) -> str:
        """Its name and the beginning of its id; a dead one is called so."""
        title = f"{self.name or self.address or self.host} ({self.id[:8]})"
        return f"{title}, dead" if self.state == DEAD else title

    def is_alive(self, pid: int, start: str) -> bool | None:
        """Whether a process of it runs; None if no report of the last seconds says so."""
        if self.state == DEAD or (pid, start) not in self.running:
            return False
        is_recent = self.fetched - self.written < _STALE and time.time() - self.fetched < _OLD
        return True if is_recent else None


@dataclass(frozen=True)
class Place:
    """Hold what was fetched of one place: its name, its node, and the text, or its end, of each file by name."""

    name: str
    node: Node
    rows: Mapping[str, str]
    events: Mapping[str, str]
    left_out: int


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what was fetched into a run directory: the name of each place to what `fetch` wrote.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if nothing was fetched.
        ValueError: it is damaged, or of another version."""
    try:
        found = json.loads(files.load_bytes(str(folder / FOLDER / FILE), _LARGEST)[0])
        if all(isinstance(one["published"], str) for one in found.values()):
            return {place: one for place, one in found.items() if keys.is_plain(place)}
    except (KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError("it is damaged, or another version of FlashPatch wrote it")


def places(folder: Path) -> tuple[list[Place], list[str]]:
    """Return the places that were fetched into a run directory, and sentences that say what of them is missing."""
    result, problems = [], []
    name = f"{folder.name}/{FOLDER}/{FILE}"
    try:
        found = kept(folder)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [], [schema.text(f"{name}: {error}")]
    for place, one in sorted(found.items()):
        try:
            result.append(_place(place, one))
        except _BROKEN as error:
            problems.append(schema.text(f"{name}: what {place} published cannot be read: {error!r}"))
            continue
        if left_out := result[-1].left_out:
            problems.append(
                f"{name}: {left_out} rows of {place} are not gathered: they cannot be read there, or all have over "
                f"{keys.MOST_BYTES >> 20} MiB"
            )
    return result, problems


def id_of(published: bytes) -> str:
    """Return the id of the node that published this; empty if it does not say, which its reader will report."""
    try:
        return str(keys.unpacked(published)["node"])
    except _BROKEN:
        return ""


def _place(name: str, one: dict[str, Any]) -> Place:
    found = keys.unpacked(base64.b64decode(one["published"]))
    node = Node(
        **{key: schema.text(str(one[key])) for key in ("name", "address", "state")},
        id=schema.text(str(found["node"])),
        host=schema.text(str(found["host"])),
        written=float(found["written"]),
        fetched=float(one["fetched"]),
        running=tuple((int(pid), str(start)) for pid, start in found["alive"]),
    )
    events = {name: text for name, text in found["events"].items() if isinstance(text, str)}
    return Place(name, node, dict(found["rows"]), events, int(found["left_out"]))


def fetch(store: Store, run: str, folder: Path, here: str = "") -> int:
    """Bring the directory of a run up to date, or make it; return how many places published.

    ``here`` is the place that this directory is: nothing is copied if there is no other. Raises StoreError if Ray does not
    answer, OSError if the directory cannot be written."""
    prefix = keys.of_place(run)
    places = {key: place for key in store.keys(prefix) if keys.is_plain(place := key.removeprefix(prefix))}
    if {*places.values()} <= {here}:
        return len(places)
    try:
        found = kept(folder)
    except (OSError, ValueError):
        found = {}
    nodes = store.nodes()
    for key, published in store.get(places).items():
        told = nodes.get(id_of(published), {})
        found[places[key]] = {
            "state": ALIVE if told.get("alive") else DEAD if told else UNKNOWN,
            "name": told.get("name", ""),
            "address": told.get("address", ""),
            "fetched": time.time(),
            "published": base64.b64encode(published).decode(),
        }
    files.write_bytes(folder / FOLDER / FILE, json.dumps(found).encode())
    return len(places)
