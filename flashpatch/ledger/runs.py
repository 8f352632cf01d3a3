"""Read a ledger back, trusting only plain files of this user inside it."""

from __future__ import annotations

import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.ledger import files, schema
from flashpatch.ledger.nodes import keys, node

LARGEST = 4 << 20
"""Bytes of a row that is read."""
_ON = re.compile(rb"(?:^|\0)FLASHPATCH=(?!0?(?:\0|$))")


@dataclass(frozen=True)
class Row:
    """Hold what one process wrote about itself; keys as in the file, checked by `flashpatch.ledger.schema`.

    ``title`` is the class of an actor of Ray. ``on`` has for each family that is on ``name``, as the user typed it, and
    ``options``, those that are not at their default, and ``off`` if it was switched off again. ``ended`` is what the process said
    at its end, empty before, None if its FlashPatch did not say it; ``engine`` names the engine that it belongs to. ``first`` says
    whether the run began in it, None if its FlashPatch did not say it.

    ``stopped`` is the signal that another process of the run sent to end it, and which, empty if none did. ``lived`` says whether it ran
    when its row was about to be read: of one that did not, the row has its last word.

    ``node`` is the node of Ray that its row was published on, None if it was not. ``fetched`` says that the row
    is a copy from there."""

    host: str
    pid: int
    start: str
    ppid: int
    argv0: str
    roles: tuple[str, ...]
    rank: Mapping[str, Any]
    versions: Mapping[str, str]
    patches: Mapping[str, Mapping[str, Any]]
    notes: Mapping[str, Any]
    error: str | None
    written: str
    run: str = ""
    first_written: float = 0.0
    title: str = ""
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ended: str | None = None
    first: bool | None = None
    engine: str = ""
    idle: str = ""
    stopped: str = ""
    lived: bool | None = None
    node: node.Node | None = None
    fetched: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        """Host, pid and start: what tells the process from all others."""
        return self.host, self.pid, self.start

    @property
    def parts(self) -> Sequence[Mapping[str, Mapping[str, Any]]]:
        """``patches`` as it was written: first its own, then those that it shares with other rows."""
        return self.patches.maps if isinstance(self.patches, ChainMap) else (self.patches,)

    @property
    def alive(self) -> bool | None:
        """Whether that very process ran when it was read; None for one of another host, unless its node says so."""
        here = self.lived if self.lived is not None else is_alive(self.host, self.pid, self.start)
        here = None if self.fetched else here
        if here is None and self.node is not None:
            return self.node.is_alive(self.pid, files.plain(self.start) or "unknown")
        return here


@dataclass(frozen=True)
class Expected:
    """Hold a row that process ``by`` expects of process ``pid``. ``start`` is empty if unknown."""

    host: str
    pid: int
    start: str
    roles: tuple[str, ...]
    families: tuple[str, ...]
    by: int
    fetched: bool = field(default=False, compare=False)

    @property
    def alive(self) -> bool | None:
        """Whether the process runs; None for one of another host or of another node's ledger."""
        return None if self.fetched else is_alive(self.host, self.pid, self.start)

    @property
    def is_starting(self) -> bool:
        """Whether it runs here and our variables reached it: it has imported no framework yet."""
        try:
            with open(f"/proc/{self.pid}/environ", "rb") as file:
                return bool(self.alive and _ON.search(file.read()))
        except OSError:  # it is gone, or another user's
            return False

    def matches(self, row: Row) -> bool:
        return (self.host, self.pid) == (row.host, row.pid) and self.start in ("", row.start)


@dataclass
class Run:
    """Hold the rows of one job. ``problems`` names each file that was not trusted or readable, and why; ``idle`` has the patches
    that rows name together, ``equal`` each state of a patch once, however many rows have it."""

    id: str
    rows: list[Row] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    written: float = 0.0
    idle: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict, repr=False)
    equal: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def missing(self) -> list[Expected]:
        """Expected processes without a row."""
        starts: dict[tuple[str, int], set[str]] = {}
        for row in self.rows:
            starts.setdefault((row.host, row.pid), set()).add(row.start)
        found = [(wanted, starts.get((wanted.host, wanted.pid), set())) for wanted in self.expected]
        return [wanted for wanted, there in found if not there or wanted.start not in {"", *there}]


def read(directory: Path) -> list[Run]:
    """Read the runs in ``directory``, oldest first. Links and files of other users are passed over, broken ones in `Run.problems`."""
    runs = [read_run(entry) for entry in entries(directory) if is_run(entry)]
    return sorted((run for run in runs if run is not None), key=lambda run: run.written)


def choose(directory: Path, wanted: str | None = None) -> Path | None:
    """Return the directory of the run ``wanted``, else of the newest, see `newest_first`.

    None if the ledger has none. Raises PatchError for a run that is not among those there are."""
    found = newest_first(directory)
    if wanted is None or not found:
        return next((folder for folder in found if read_run(folder) is not None), None)
    if directory / wanted not in found:
        known = ", ".join(folder.name for folder in found[:5])
        raise PatchError(
            f"there is no run {wanted} in {directory}.", advice=f"The newest runs there are: {known}."
        )
    return directory / wanted


def newest_first(directory: Path) -> list[Path]:
    """Return the directories of a ledger that may be runs: those that live, the one first whose oldest living process began last;
    then the others, the one first that was written to last."""
    found = sorted(filter(is_run, entries(directory)), key=_age, reverse=True)
    return [Path(entry.path) for entry in found]


def _age(entry: os.DirEntry[str]) -> tuple[bool, float]:
    names = (keys.FILE.fullmatch(one.name) for one in entries(entry))
    living = [of["start"] for of in names if of and of["kind"] == "row" and is_alive_by_name(of)]
    try:
        written = 0.0 if living else entry.stat(follow_symlinks=False).st_mtime
    except OSError:  # another process removed it
        written = 0.0
    return bool(living), min((float(one) for one in living if one.isdecimal()), default=written)


def is_alive_by_name(of: re.Match[str]) -> bool | None:
    """Return `is_alive` of the process in the name of a file, a match of `keys.FILE`."""
    return is_alive(of["host"], int(of["pid"]), "" if of["start"] == "unknown" else of["start"])


def is_alive(host: str, pid: int, start: str) -> bool | None:
    """Return whether the process runs on this host; None when it belongs to another host."""
    if host != files.host():
        return None
    now = files.process_start(pid)
    return now is not None and ("" in (now, start) or now == start)


def is_run(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a ledger may be a run: a directory, no link, whose name is not hidden."""
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")


def read_run(folder: os.DirEntry[str] | Path) -> Run | None:
    """Read one run of a ledger, with what was fetched from other nodes, without FlashPatch's own commands; None when
    there is nothing of a run in it. Raises nothing, see `read`."""
    run = Run(schema.text(folder.name))
    for name in sorted(entry.name for entry in entries(folder)):
        _take(run, name, name, lambda name: files.load_bytes(os.path.join(folder, name), LARGEST))
    places, problems = node.places(Path(folder))
    run.problems += problems
    known = {row.key: number for number, row in enumerate(run.rows)}
    for place in places:
        _add(run, known, place)
    sent = {(row.host, who): how for row in run.rows for who, how in row.notes.get("stopped", {}).items()}
    run.rows = [
        replace(row, stopped=how) if (how := sent.get((row.host, f"{row.pid} {row.start}"))) else row
        for row in run.rows
        if not files.is_own_command(row.argv0)
    ]
    return run if run.rows or run.expected or run.problems else None


def _add(run: Run, known: dict[tuple[str, int, str], int], place: node.Place) -> None:
    """Add what was fetched from one place; ``known``: the key of each row to its number. A row that is here already is newer."""
    found = Run(run.id)
    for name in sorted(place.rows):
        at = f"{node.FOLDER}/{place.name}/{name}"
        _take(found, name, at, lambda name: (place.rows.get(name, "{}"), place.node.fetched))
    run.problems += found.problems
    for row in found.rows:
        number = known.setdefault(row.key, len(run.rows))
        if number == len(run.rows):
            run.rows.append(replace(row, node=place.node, fetched=True))
        elif run.rows[number].node is None:
            run.rows[number] = replace(run.rows[number], node=place.node)
    if found.expected:
        expected = set(run.expected)
        run.expected += [replace(one, fetched=True) for one in found.expected if one not in expected]
    run.written = max(run.written, place.node.fetched)


def _take(run: Run, name: str, path: str, read: Callable[[str], tuple[bytes | str, float]]) -> None:
    """Add the row, or the expected one, of a file with such a name, or say in ``problems`` why that at ``path`` is none.

    ``read`` returns content and time of modification of a file by its name."""
    if name.partition("-")[0] not in ("row", "expect") or not name.endswith(".json"):
        return
    try:
        of = keys.FILE.fullmatch(name)
        lived = is_alive_by_name(of) if of else None  # asked before its last word may come
        content, modified = read(name)
        value = schema.loads(content)
        if name.startswith("row"):
            fields = schema.row(value)
            if (idle := fields.get("idle")) and idle not in run.idle:
                beside = files.file_name("idle", fields["host"], 0, idle)
                run.idle[idle] = schema.idle(schema.loads(read(beside)[0]), "idle")
            patches = {
                sys.intern(id): run.equal.setdefault((*one.values(),), one)
                for id, one in fields["patches"].items()
            }
            shared = [run.idle[idle]] if idle else []
            run.rows.append(Row(**fields | {"patches": ChainMap(patches, *shared)}, lived=lived))
        else:
            run.expected.append(Expected(**schema.expected(value)))
    except (*schema.BROKEN, KeyError, TypeError, AttributeError) as error:
        run.problems.append(schema.text(f"{run.id}/{path}: {str(error) or type(error).__name__}"))
    else:
        run.written = max(run.written, modified)


def entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return what is in a directory; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
