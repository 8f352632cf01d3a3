"""Keep the verdicts of contract checks on disk, so that a job's processes do not all parse the same sources.

One file per patch and environment, in ``FLASHPATCH_CACHE`` or ``flashpatch/verdicts`` in the user's cache directory;
``FLASHPATCH_CACHE=0`` switches the cache off. A verdict counts only while nothing that it was derived from has
changed: the record, the framework's version, the files that were read (size, times, inode), those that were
looked for in vain, the places of the packages, Python's version, and the code of the check itself. A file that is
damaged, or not this user's own, is as good as none; one that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import flashpatch
from flashpatch.contracts import check, source
from flashpatch.contracts.check import ContractResult
from flashpatch.contracts.source import RootFor, Sources, Stamp
from flashpatch.ledger import files
from flashpatch.record import Patch

_LARGEST = 1 << 20
_OFF = "0"
_CODE = (check, source, sys.modules[__name__])


def check(patch: Patch, source_root_for: RootFor, version: str) -> ContractResult:
    """`flashpatch.contracts.check.check`, from the cache where that is sound.

    Args:
        patch: the patch to check.
        source_root_for: top-level package name to its source directory, or None.
        version: exact framework version.
    """
    folder = directory()
    key = _key(patch, version) if folder is not None else None
    if folder is None or key is None:
        return check.check(patch, source_root_for, version)
    place = ":".join(str(source_root_for(name)) for name in sorted(_packages(patch)))
    path = folder / f"{files.plain(patch.id)}-{_digest(place)[:16]}.json"
    kept = _read(path, key, source_root_for)
    if kept is not None:
        return kept
    sources = Sources(source_root_for)
    result = check.check(patch, source_root_for, version, sources)
    _write(path, key, sources, result)
    return result


def directory() -> Path | None:
    """Where verdicts are kept, or None when they are not."""
    chosen = os.environ.get("FLASHPATCH_CACHE", "")
    if chosen == _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser()
    return Path(files.cache_home(), "flashpatch", "verdicts")


def _packages(patch: Patch) -> set[str]:
    return {target.partition(":")[0].partition(".")[0] for target in patch.targets}


def _key(patch: Patch, version: str) -> str | None:
    """Digest of all that the verdict depends on but files of frameworks; None when our own code has no files."""
    try:
        code = [source.stamp(module.__file__ or "") for module in _CODE]
    except OSError:
        return None
    held = patch.contract
    facts = (
        flashpatch.__version__,
        code,
        sys.version_info[:3],
        version,
        patch.id,
        patch.targets,
        held.params,
        held.exists,
        held.mentions,
        sorted(held.fingerprints.items()),
    )
    return _digest(repr(facts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, key: str, source_root_for: RootFor) -> ContractResult | None:
    """The verdict in a file of ours, if it was made for ``key`` and nothing has changed since."""
    try:
        written = json.loads(_own(path))
        data = written["body"]
        if (
            written["sum"] != _digest(json.dumps(data))
            or data["key"] != key
            or not _unchanged(data, source_root_for)
        ):
            return None
        ok, target, drift, line = data["verdict"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if type(ok) is not bool or not all(isinstance(text, str) for text in (target, drift, line)):
        return None
    return ContractResult(ok, target, drift, line)


def _own(path: Path) -> bytes:
    """Content of a plain file that belongs to this user and that nobody else may write; else OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not private or found.st_size > _LARGEST:
            raise PermissionError(f"{path} is not a file of this user alone")
        return file.read(_LARGEST)


def _unchanged(data: Any, source_root_for: RootFor) -> bool:
    for package, root in data["roots"].items():
        found = source_root_for(package)
        if (None if found is None else str(found)) != root:
            return False
    if any(Path(path).is_file() for path in data["absent"]):
        return False
    return all(list(_stamp_or_none(path) or ()) == stamp for path, stamp in data["files"].items())


def _stamp_or_none(path: str) -> Stamp | None:
    try:
        return source.stamp(path)
    except OSError:
        return None


def _write(path: Path, key: str, sources: Sources, result: ContractResult) -> None:
    if any(_is_fresh(stamp) for stamp in sources.read.values()):
        return
    roots = {package: None if root is None else str(root) for package, root in sources.roots.items()}
    body = {
        "key": key,
        "verdict": [result.ok, result.target, result.drift, result.line],
        "roots": roots,
        "files": {file: list(stamp) for file, stamp in sources.read.items()},
        "absent": sorted(sources.absent),
    }
    try:
        files.write(path, {"sum": _digest(json.dumps(body)), "body": body})
    except OSError:  # a cache that cannot be written costs time, nothing else
        pass


def _is_fresh(found: Stamp) -> bool:
    """Whether a file is so new that one more change might leave the stamp as it is: clocks of file systems go
    in steps, of some ms, or of 1 to 2 s where no fraction is kept."""
    _, modified, changed, _ = found
    latest = max(modified, changed)
    step = 2_000_000_000 if latest % 1_000_000_000 == 0 else 50_000_000
    return time.time_ns() - latest < step
