"""Say of a node whose ledger was fetched what it is called, whether it is alive, and which of its processes are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "nodes"
"""Directory in a run directory that holds one more per place, shaped like a run directory, with `FILE` in it."""

FILE = "node.json"

ALIVE, DEAD, UNKNOWN = "alive", "dead", "unknown"

_STALE = 30.0  # seconds from a place's last word to the look at it
_OLD = 60.0  # seconds from the look at it to now
_LARGEST = 16 << 20  # bytes of FILE


@dataclass(frozen=True)
class Node:
    """Hold what was known of a node when its ledger was fetched.

    Attributes:
        id: Ray's id, hexadecimal.
        name: Ray's name for it; its address where none was given.
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
        """Whether a process of it runs; None where nobody said so in the last seconds."""
        if self.state == DEAD or (pid, start) not in self.running:
            return False
        is_recent = self.fetched - self.written < _STALE and time.time() - self.fetched < _OLD
        return True if is_recent else None


def of(index: dict[str, Any]) -> Node:
    """Return the node of a place's index. Raises KeyError, TypeError or ValueError where it is none."""
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


def places(folder: Path) -> Iterator[tuple[Path, Node | None, list[str]]]:
    """Go through the places that were fetched into a run directory.

    Yields:
        The place's directory, its node, and sentences that say what of it is missing; the node is None where it is not
        known, which a sentence says.
    """
    from flashpatch.ledger import runs

    for entry in sorted(runs.entries(folder / FOLDER), key=lambda entry: entry.name):
        if not runs.is_run(entry):
            continue
        path = Path(entry.path)
        try:
            index = json.loads(runs.load_bytes(str(path / FILE), _LARGEST)[0])
            problems = [str(problem) for problem in index["problems"]]
            yield path, of(index) if "node" in index else None, problems
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield path, None, [f"{folder.name}/{FOLDER}/{entry.name}/{FILE}: {error!r}"]
