"""Check a patch before its framework is imported: version, contract, conflicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from flashpatch.contracts import contract, verdict_cache, versions
from flashpatch.contracts.source import RootFor
from flashpatch.record import Patch


@dataclass(frozen=True)
class Findings:
    """Hold the result of `examine`.

    Attributes:
        target: the target to patch in this installation, or empty.
        installed: the distribution that owns the package, if known.
        problem: why the patch cannot be armed, or None.
    """

    target: str = ""
    installed: versions.Installed | None = None
    problem: str | None = None


def packages(patch: Patch) -> set[str]:
    """Return the top-level packages of the patch's targets."""
    return {target.partition(":")[0].partition(".")[0] for target in patch.targets}


def module_of(target: str) -> str:
    """Return ``"package.module"`` of ``"package.module:Qual.name"``."""
    return target.partition(":")[0]


def present(patch: Patch) -> bool:
    """Whether the framework of the patch is installed."""
    return any(contract.installed_root(package) is not None for package in packages(patch))


def examine(patch: Patch, root_for: RootFor = contract.installed_root) -> Findings:
    """Check version, contract and rival distributions, without importing the framework.

    Args:
        patch: the patch to check.
        root_for: `flashpatch.contracts.contract.installed_root`, or one that remembers its answers.
    """
    package = next((p for p in sorted(packages(patch)) if root_for(p) is not None), None)
    if package is None:
        return Findings(problem=f"{', '.join(sorted(packages(patch)))} is not installed")
    installed = versions.owner(package, root_for)
    if installed is None:
        return Findings(problem=f"the version of {package} is unknown: no installed distribution owns it")
    if not versions.satisfies(patch.requires, installed.version):
        return Findings("", installed, f"{installed} does not meet {patch.requires}")
    held = verdict_cache.check(patch, root_for, installed.version)
    if not held.ok:
        return Findings(held.target, installed, f"contract: {held.drift}")
    return Findings(held.target, installed, next(_rivals(patch), None))


def _rivals(patch: Patch) -> Iterator[str]:
    """Return what conflicts with the patch: an installed distribution, or a module imported here."""
    for name in patch.conflicts:
        if _is_distribution(name):
            yield f"conflicts with distribution {name}"
        elif sys.modules.get(name) is not None:
            yield f"conflicts with {name}, which is active in this process"


def _is_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
