"""Keep the verdicts of contract checks on disk, so that a job's processes do not all parse the same sources.

A verdict counts only while nothing that it was derived from has changed: the record, the framework's version,
the files that were read, those that were looked for in vain, the places of the packages, Python's version, and
the code of the check itself. The directory is ``FLASHPATCH_CACHE``, else ``flashpatch/verdicts`` in the user's cache
directory; 0 switches the cache off. A file that is damaged, or not this user's own, counts as absent; one that cannot be
written is done without. Writers replace whole files, so any number of them may write at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flashpatch
from flashpatch import user_directories
from flashpatch.contracts import contract, source
from flashpatch.contracts.contract import ContractResult
from flashpatch.contracts.source import RootFor, Sources, Stamp, stamp
from flashpatch.ledger import files
from flashpatch.record import Patch

_CODE = (contract, source, sys.modules[__name__])
_LARGEST = 1 << 20  # bytes of a file
_MOST = 4000  # files


def check(patch: Patch, source_root_for: RootFor, version: str) -> ContractResult:
    """`flashpatch.contracts.contract.check`, from the cache if that is sound.

    Args:
        patch: the patch to check.
        source_root_for: top-level package name to its source directory, or None.
        version: exact framework version.
    """
    key = _key(patch, version) if directory() is not None else None
    if key is None:
        return contract.check(patch, source_root_for, version)
    packages = sorted({target.partition(":")[0].partition(".")[0] for target in patch.targets})
    place = digest(":".join(str(source_root_for(package)) for package in packages))
    name = f"{files.plain(patch.id)}-{place[:16]}.json"
    kept = _kept(name, key, source_root_for)
    if kept is not None:
        return kept
    sources = Sources(source_root_for)
    result = contract.check(patch, source_root_for, version, sources)
    body = {
        "key": key,
        "verdict": [result.ok, result.target, result.drift, result.line],
        "roots": {package: _text(root) for package, root in sources.roots.items()},
        "files": {file: list(found) for file, found in sources.read.items()},
        "absent": sorted(sources.absent),
    }
    keep(name, body, sources.read.values())
    return result


def _key(patch: Patch, version: str) -> str | None:
    """Digest of what a verdict depends on beside a framework's files; None when our own code has no files."""
    try:
        code = [stamp(module.__file__ or "") for module in _CODE]
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
        sorted(held.since.items()),
    )
    return digest(repr(facts))


def _kept(name: str, key: str, source_root_for: RootFor) -> ContractResult | None:
    """The verdict that was kept for ``key``, if nothing has changed since."""
    body = read(name)
    try:
        if body is None or body["key"] != key or not _unchanged(body, source_root_for):
            return None
        ok, target, drift, line = body["verdict"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if type(ok) is not bool or not all(isinstance(text, str) for text in (target, drift, line)):
        return None
    return ContractResult(ok, target, drift, line)


def _unchanged(body: Any, source_root_for: RootFor) -> bool:
    return (
        all(_text(source_root_for(package)) == root for package, root in body["roots"].items())
        and all(list(stamp(path)) == known for path, known in body["files"].items())
        and not any(Path(path).is_file() for path in body["absent"])
    )


def _text(root: Path | str | None) -> str | None:
    return None if root is None else str(root)


def directory() -> Path | None:
    """Where facts are kept, or None when they are not."""
    chosen = os.environ.get("FLASHPATCH_CACHE", "")
    if chosen == "0":
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
