"""Remove old runs from the ledger: by age, and by number beyond the newest.

The process that begins a run looks once, at its start. A run stays while one of its processes may be alive, while
it was written to within the last hour, and whatever is in its directory that FlashPatch did not put there keeps all
of it. A directory is renamed before its files are removed, so of two processes only one removes it, and what a
killed one leaves is removed by the next.
"""

from __future__ import annotations

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

_FILE = re.compile(
    r"(?:row|expect)-.*\.json|events-.*\.jsonl|\.(?:row|expect|events)-.*\.jsonl?\.\d+|\.publisher-[0-9a-f]+"
)
_DAY = 86400.0
_RECENT = 3600.0  # seconds
_LEFT = 60.0  # seconds from a renaming until the process that renamed counts as killed
_FILES = 500  # looked at in one go; the rest is left to the next run
_done = False


def prune_once() -> None:
    """Remove old runs as ``FLASHPATCH_KEEP_DAYS`` and ``FLASHPATCH_KEEP_RUNS`` say; later calls do nothing.

    Raises nothing: a value that is no number, and a failure, are logged as a warning.
    """
    global _done
    if _done:
        return
    _done = True
    try:
        days, runs = limits()
        prune(files.directory(), files.run_id(), days, runs)
    except Exception as error:
        import logging

        logging.getLogger("flashpatch").warning("flashpatch: old runs are not removed: %s", error)


def limits() -> tuple[float, int]:
    """Return the days and the number of runs that the environment says to keep.

    Raises:
        ValueError: a variable is no number of at least 0.
    """
    return _number(KEEP_DAYS, DEFAULT_DAYS), int(_number(KEEP_RUNS, DEFAULT_RUNS))


def prune(directory: Path, present: str, days: float, runs: int) -> list[str]:
    """Remove runs older than ``days``, and of the others all but the newest ``runs``; 0 is no limit.

    A process on another host counts as alive until its run is older than ``days``. The oldest come first; a call ends
    with the run that takes it past `_FILES` files, so that no start waits long.

    Args:
        directory: the ledger.
        present: id of the run that this process belongs to; it stays, and counts as one of ``runs``.
        days: age since a process of the run last wrote.
        runs: number of runs to keep.

    Returns:
        The ids of the runs removed here.
    """
    now, files_seen = time.time(), 0
    found, removed = _own_directories(directory), []
    for status, entry in found:
        if entry.name.startswith(REMOVED) and now - status.st_ctime > _LEFT:
            _delete(entry.path)
    found = [pair for pair in found if not pair[1].name.startswith(".")]
    for rank, (status, entry) in enumerate(found):
        age = now - status.st_mtime
        by_age = bool(days) and age > days * _DAY
        by_number = bool(runs) and len(found) - rank > runs
        if not (by_age or by_number):
            break
        files_seen += _files_in(entry.path)
        may_go = entry.name != present and age > _RECENT and _is_over(entry, by_age)
        if may_go and _remove(entry, status.st_mtime_ns):
            removed.append(entry.name)
        if files_seen > _FILES:
            break
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


def _own_directories(directory: Path) -> list[tuple[os.stat_result, os.DirEntry[str]]]:
    """Directories of this user, the one written to least recently first. Every write of a row renames a file into
    its run's directory, which changes the directory's own time."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process removed it
                continue
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append((status, entry))
    return sorted(found, key=lambda pair: pair[0].st_mtime_ns)


def _is_over(entry: os.DirEntry[str], by_age: bool) -> bool:
    """Whether a directory is a run with nothing else in it, and no process of it is alive."""
    from flashpatch.ledger import runs

    if not _holds_only_a_run(entry.path):
        return False
    run = runs.read_run(entry)
    if run is None:
        return False
    alive = {row.alive for row in run.rows} | {wanted.alive for wanted in run.expected}
    unknown = None in alive or bool(run.problems)
    named = {row.run for row in run.rows}  # a copy under another name was made to be kept
    return named == {entry.name} and True not in alive and (by_age or not unknown)


def _holds_only_a_run(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return all(
                entry.name in _FOLDERS
                if entry.is_dir(follow_symlinks=False)
                else _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                for entry in entries
            )
    except OSError:
        return False


def _files_in(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:  # another process has removed it
        return 0


def _remove(entry: os.DirEntry[str], written: int) -> bool:
    target = os.path.join(os.path.dirname(entry.path), f"{REMOVED}{entry.name}-{os.getpid()}")
    try:
        os.rename(entry.path, target)
        if os.lstat(target).st_mtime_ns != written:  # a process has joined it meanwhile
            os.rename(target, entry.path)
            return False
    except OSError:  # another process was first
        return False
    return _delete(target)


def _delete(folder: str) -> bool:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    return True
