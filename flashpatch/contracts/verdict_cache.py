"""Keep the verdicts of contract checks on disk, so that a job's processes do not all parse the same sources.

A verdict counts only while nothing that it was derived from has changed: the record, the framework's version,
the files that were read, those that were looked for in vain, the places of the packages, Python's version, and
the code of the check itself. The directory is ``FLASHPATCH_CACHE``, else ``flashpatch/verdicts`` in the user's cache
directory; 0 switches the cache off. A file that is damaged, or not this user's own, counts as absent; one that cannot be
written is done without. Writers replace whole files, so any number of them may write at once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import astuple
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
    """`flashpatch.contracts.contract.check`, from the cache if that is sound."""
    folder, key = directory(), _key(patch, version)
    sources = Sources(source_root_for)
    if folder is None or key is None:
        return contract.check(patch, sources, version)
    packages = sorted({target.partition(":")[0].partition(".")[0] for target in patch.targets})
    place = _digest(":".join(str(source_root_for(package)) for package in packages))
    path = folder / f"{files.plain(patch.id)}-{place[:16]}.json"
    kept = _kept(path, key, source_root_for)
    if kept is not None:
        return kept
    result = contract.check(patch, sources, version)
    if not any(map(_is_fresh, sources.read.values())):
        _keep(path, key, result, sources)
    return result


def directory() -> Path | None:
    """Where verdicts are kept, or None when they are not."""
    chosen = os.environ.get("FLASHPATCH_CACHE", "")
    if chosen == "0":
        return None
    if chosen:
        return Path(user_directories.expand(chosen))
    return Path(user_directories.cache_home(), "flashpatch", "verdicts")


def _key(patch: Patch, version: str) -> str | None:
    """Digest of what a verdict depends on beside a framework's files; None when our own code has no files."""
    try:
        code = [stamp(module.__file__ or "") for module in _CODE]
    except OSError:
        return None
    facts = (flashpatch.__version__, code, sys.version_info[:3], version)
    return _digest(repr((*facts, patch.id, patch.targets, patch.contract)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(path: Path, key: str, source_root_for: RootFor) -> ContractResult | None:
    """The verdict that was kept for ``key``, if nothing has changed since."""
    try:
        written = json.loads(files.load_bytes(str(path), _LARGEST, forbidden=0o022)[0])
        body = written["body"]
        is_whole = written["sum"] == _digest(json.dumps(body)) and body["key"] == key
        if not is_whole or not _unchanged(body, source_root_for):
            return None
        ok, *texts = body["verdict"]
        if type(ok) is bool and all(isinstance(text, str) for text in texts):
            return ContractResult(ok, *texts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None


def _unchanged(body: Any, source_root_for: RootFor) -> bool:
    return (
        all(str(source_root_for(package)) == root for package, root in body["roots"].items())
        and all(list(stamp(path)) == known for path, known in body["files"].items())
        and not any(Path(path).is_file() for path in body["absent"])
    )


def _keep(path: Path, key: str, result: ContractResult, sources: Sources) -> None:
    body = {
        "key": key,
        "verdict": astuple(result),
        "roots": {package: str(root) for package, root in sources.roots.items()},
        "files": sources.read,
        "absent": sorted(sources.absent),
    }
    try:
        files.write(path, {"sum": _digest(json.dumps(body)), "body": body})
        _drop_old(path.parent)
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
