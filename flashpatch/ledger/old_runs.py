"""Remove old runs from the ledger: by age, and by number beyond the newest, those in which nothing happened first.

The process that begins a run looks once, at its start. A run stays while one of its processes may be alive, while it was written
to within the last hour, and whatever is in its directory that FlashPatch did not put there keeps all of it."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time

from flashpatch.ledger import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

KEEP_DAYS, KEEP_RUNS = "FLASHPATCH_KEEP_DAYS", "FLASHPATCH_KEEP_RUNS"
DEFAULT_DAYS, DEFAULT_RUNS = 30.0, 500
REMOVED = ".removed-"
"""How the name of a directory begins that is being removed."""

_FOLDERS = frozenset({"samples", "nodes"})
"""What is kept beside the rows: eagle's queue of samples, and what was fetched from other nodes."""

_TEMPORARY = re.compile(r"\.(?:row|expect)-.*\.json\.\d+|\.publisher-[0-9a-f]+|\.summary\.json(?:\.\d+)?")
_DAY = 86400.0
_RECENT = 3600.0  # seconds
_MOST = 20  # runs removed in one go; the rest is left to the next start


def prune_ledger() -> None:
    """Remove old runs as ``FLASHPATCH_KEEP_DAYS`` and ``FLASHPATCH_KEEP_RUNS`` say.

    Raises nothing: a value that is no number, and a failure, are logged as a warning."""
    try:
        prune(files.directory(), files.run_id(), *limits())
    except Exception as error:
        logging.getLogger("flashpatch").warning("flashpatch: old runs are not removed: %s", error)


def limits() -> tuple[float, int]:
    """Return the days and the number of runs that the environment says to keep. Raises ValueError if one is no number of at least 0."""
    return _number(KEEP_DAYS, DEFAULT_DAYS), int(_number(KEEP_RUNS, DEFAULT_RUNS))


def prune(directory: Path, present: str, days: float, runs: int) -> list[str]:
    """Remove runs older than ``days``, and of the others all but ``runs``, idle ones first; 0 is no limit.

    The run ``present``, this process's, stays, and counts as one of ``runs``. A process on another host counts as alive
    until its run was last written to more than ``days`` ago. Of all that are over eagle's queue goes. Return the ids of those that
    were removed here."""
    now, removed = time.time(), list[str]()
    found = _own_directories(directory)
    old = [run for run in found if days and now - found[run] > days * _DAY]
    young = [run for run in found if run not in old]
    surplus = max(len(young) - runs, 0) if runs else 0
    others = [run for run in young if surplus and os.path.basename(run) != present]
    idle_first = sorted(others, key=lambda run: (_has_events(run), found[run]))
    may_go = {run for run in found if os.path.basename(run) != present and now - found[run] > _RECENT}
    for run in [*old, *idle_first[:surplus]]:
        if run in may_go and len(removed) < _MOST and _is_over(run, by_age=run in old) and _remove(run):
            removed.append(os.path.basename(run))
    for run in may_go.intersection(young):
        queue = os.path.join(run, "samples")
        if os.path.isdir(queue) and _is_over(run, by_age=False):
            _delete(queue)
            os.utime(run, (found[run], found[run]))  # it keeps its age
    return removed


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={text!r} is not a number of at least 0")
    return value


def _own_directories(directory: Path) -> dict[str, float]:
    """Return this user's directories and when each was written to, the least recently first; remove what a killed
    process left. Every write of a row renames a file into its run's directory, which changes the directory's own time."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process removed it
                continue
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if entry.name.startswith(REMOVED):
                _delete(entry.path)
            elif not entry.name.startswith("."):
                found[entry.path] = status.st_mtime
    return dict(sorted(found.items(), key=lambda run: run[1]))


def _has_events(folder: str) -> bool:
    from flashpatch.ledger import runs

    return any(entry.name.startswith("events-") for entry in runs.entries(folder))


def _is_over(folder: str, by_age: bool) -> bool:
    """Whether a directory is a run with nothing else in it, and no process of it may be alive."""
    from flashpatch.ledger import runs
    from flashpatch.ledger.nodes import keys

    rows, alive = [], set()
    for entry in runs.entries(folder):
        of = keys.FILE.fullmatch(entry.name)
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _FOLDERS:
                return False
        elif not entry.is_file(follow_symlinks=False) or not (of or _TEMPORARY.fullmatch(entry.name)):
            return False
        elif of and of["kind"] in ("row", "expect"):
            alive.add(runs.is_alive_by_name(of))
            rows += [entry.path] if of["kind"] == "row" else []
    if not rows or True in alive or (None in alive and not by_age):
        return False
    try:
        row = json.loads(files.load_bytes(rows[0], runs.LARGEST)[0])
        return row["run"] == os.path.basename(folder)  # a copy under another name was made to be kept
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False


def _remove(folder: str) -> bool:
    """Remove a directory, renamed first, so that of two processes only one does and no half of a run is left."""
    target = os.path.join(os.path.dirname(folder), f"{REMOVED}{os.path.basename(folder)}-{os.getpid()}")
    try:
        os.rename(folder, target)
    except OSError:  # another process was first
        return False
    _delete(target)
    return True


def _delete(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
