"""Say of a node whose ledger was fetched what it is called, whether it is alive, and which of its processes are."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpatch.ledger import files
from flashpatch.ledger.nodes import keys

FOLDER = "nodes"
"""Directory in a run directory that holds `FILE`, and for each place a directory with its rows and events."""

FILE = "nodes.json"
"""Each place and what is known of it; one file, since replacing many takes seconds on a busy disk."""

ALIVE, DEAD, UNKNOWN = "alive", "dead", "unknown"

_STALE = 30.0  # seconds from a place's last word to the look at it
_OLD = 60.0  # seconds from the look at it to now
_LARGEST = 64 << 20  # bytes of FILE


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
        running: pid and start of its processes that ran.
        is_here: whether its run directory is the one that this was fetched into, so that no file was copied.
    """

    id: str
    name: str
    address: str
    host: str
    state: str
    written: float
    fetched: float
    running: tuple[tuple[int, str], ...]
    is_here: bool = False

    @property
    def title(self) -> str:
        """Its name and the beginning of its id."""
        return f"{self.name or self.address or self.host} ({self.id[:8]})"

    @property
    def label(self) -> str:
        """Its title; a dead one is called so."""
        return f"{self.title}, dead" if self.state == DEAD else self.title

    def is_alive(self, pid: int, start: str) -> bool | None:
        """Whether a process of it runs; None if no report of the last seconds says so."""
        if self.state == DEAD or (pid, start) not in self.running:
            return False
        is_recent = self.fetched - self.written < _STALE and time.time() - self.fetched < _OLD
        return True if is_recent else None


def of(index: dict[str, Any]) -> Node:
    """Return the node of a place's index. Raises KeyError, TypeError or ValueError if it is no node."""
    return Node(
        id=str(index["node"]),
        name=str(index["name"]),
        address=str(index["address"]),
        host=str(index["host"]),
        state=str(index["state"]),
        written=float(index["written"]),
        fetched=float(index["fetched"]),
        running=tuple((int(pid), str(start)) for pid, start in index["alive"]),
        is_here=bool(index.get("here")),
    )


def indexes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what was fetched into a run directory: the name of each place to its index.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if nothing was fetched.
        ValueError: it is not what `flashpatch.ledger.nodes.fetch` writes.
    """
    found = json.loads(files.load_bytes(str(folder / FOLDER / FILE), _LARGEST)[0])
    if not isinstance(found, dict) or not all(isinstance(index, dict) for index in found.values()):
        raise ValueError("it does not hold an index per place")
    return {place: index for place, index in found.items() if keys.is_plain(place)}


def rows_name(version: int) -> str:
    """Return the name of the file of a place's rows: another one for other rows, so that none is replaced."""
    return f"rows-{version:08x}.z"


@dataclass(frozen=True)
class Place:
    """Hold what was fetched of one place.

    Attributes:
        folder: its directory here, with its files of events.
        rows: the file with its rows.
        node: its node; None if it is not known.
        problems: sentences that say what of it is missing.
    """

    folder: Path
    rows: Path
    node: Node | None
    problems: list[str]


def places(folder: Path) -> tuple[list[Place], list[str]]:
    """Return the places that were fetched into a run directory, and sentences that say what cannot be read."""
    try:
        found = indexes(folder)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [], [f"{folder.name}/{FOLDER}/{FILE}: {error}"]
    result = []
    for place, index in sorted(found.items()):
        target = folder / FOLDER / place
        try:
            problems = [str(problem) for problem in index["problems"]]
            rows = target / rows_name(int(index.get("rows", 0)))
            result.append(Place(target, rows, of(index) if "node" in index else None, problems))
        except (ValueError, KeyError, TypeError) as error:
            result.append(Place(target, target, None, [f"{folder.name}/{FOLDER}/{FILE}: {place}: {error!r}"]))
    return result, []
