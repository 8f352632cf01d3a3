"""Keep the verdicts of contract checks on disk, so that a job's processes do not all parse the same sources.

A verdict counts only while nothing that it was derived from has changed: the record, the framework's version,
the files that were read, those that were looked for in vain, the places of the packages, Python's version, and
the code of the check itself. Where it is kept, and how to switch that off: `flashpatch.contracts.disk_cache`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flashpatch
from flashpatch.contracts import contract, disk_cache, source
from flashpatch.contracts.contract import ContractResult
from flashpatch.contracts.source import RootFor, Sources
from flashpatch.ledger import files
from flashpatch.record import Patch

_CODE = (contract, source, sys.modules[__name__])


def check(patch: Patch, source_root_for: RootFor, version: str) -> ContractResult:
    """`flashpatch.contracts.contract.check`, from the cache if that is sound.

    Args:
        patch: the patch to check.
        source_root_for: top-level package name to its source directory, or None.
        version: exact framework version.
    """
    key = _key(patch, version) if disk_cache.directory() is not None else None
    if key is None:
        return contract.check(patch, source_root_for, version)
    packages = sorted({target.partition(":")[0].partition(".")[0] for target in patch.targets})
    place = disk_cache.digest(":".join(str(source_root_for(package)) for package in packages))
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
        "files": {file: list(stamp) for file, stamp in sources.read.items()},
        "absent": sorted(sources.absent),
    }
    disk_cache.keep(name, body, sources.read.values())
    return result


def _key(patch: Patch, version: str) -> str | None:
    """Digest of what a verdict depends on beside a framework's files; None when our own code has no files."""
    try:
        code = [disk_cache.stamp(module.__file__ or "") for module in _CODE]
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
    return disk_cache.digest(repr(facts))


def _kept(name: str, key: str, source_root_for: RootFor) -> ContractResult | None:
    """The verdict that was kept for ``key``, if nothing has changed since."""
    body = disk_cache.read(name)
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
        and all(list(disk_cache.stamp(path)) == stamp for path, stamp in body["files"].items())
        and not any(Path(path).is_file() for path in body["absent"])
    )


def _text(root: Path | str | None) -> str | None:
    return None if root is None else str(root)
