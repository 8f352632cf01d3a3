"""Keep on disk what every process of a job would otherwise derive from the same files anew.

The directory is ``FLASHPATCH_CACHE``, else ``flashpatch/verdicts`` in the user's cache directory; 0 switches the
cache off. A file that is damaged, or not this user's own, counts as absent; one that cannot be written is done
without. Writers replace whole files, so any number of them may write at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashpatch import user_directories
from flashpatch.ledger import files

Stamp = tuple[int, int, int, int]
"""What tells a file from a changed one: size, times of modification and of change in ns, inode."""

_LARGEST = 1 << 20
_MOST = 4000
_OFF = "0"


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file or directory that is there; else OSError."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def directory() -> Path | None:
    """Where facts are kept, or None when they are not."""
    chosen = os.environ.get("FLASHPATCH_CACHE", "")
    if chosen == _OFF:
        return None
    if chosen:
        return Path(user_directories.expand(chosen))
    return Path(user_directories.cache_home(), "flashpatch", "verdicts")


def digest(text: str) -> str:
    """A name for a text, 64 letters long."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(name: str) -> Any:
    """What was kept under a name, or None. Whether it still holds is for the caller to see."""
    folder = directory()
    if folder is None:
        return None
    try:
        written = json.loads(files.load_bytes(str(folder / name), _LARGEST, forbidden=0o022)[0])
        return written["body"] if written["sum"] == digest(json.dumps(written["body"])) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(name: str, body: dict[str, Any], stamps: Iterable[Stamp]) -> None:
    """Keep what was derived from files with these stamps; not when one of them may change unnoticed."""
    folder = directory()
    if folder is None or any(map(_is_fresh, stamps)):
        return
    try:
        files.write(folder / name, {"sum": digest(json.dumps(body)), "body": body})
        _drop_old(folder)
    except OSError:  # costs time, nothing else
        pass


def _drop_old(folder: Path) -> None:
    """Keep the directory from growing for ever, as environments come and go: drop the older half."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.endswith(".json")]
    if len(found) > _MOST:
        found.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
        for entry in found[: len(found) // 2]:
            os.unlink(entry.path)


def _is_fresh(found: Stamp) -> bool:
    """Whether a file is so new that one more change might leave the stamp as it is: clocks of file systems go
    in steps, of some ms, or of 1 to 2 s if no fraction is kept."""
    _, modified, changed, _ = found
    latest = max(modified, changed)
    step = 2_000_000_000 if latest % 1_000_000_000 == 0 else 50_000_000
    return time.time_ns() - latest < step
