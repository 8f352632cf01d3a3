"""Check a patch before its framework is imported: version, contract, conflicts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from flashpatch.contracts import contract, verdict_cache, versions
from flashpatch.contracts.source import RootFor
from flashpatch.record import Patch


@dataclass(frozen=True)
class Findings:
    """Hold the result of `examine`."""

    target: str = ""  # to patch in this installation, or empty
    installed: versions.Installed | None = None  # the distribution that owns the package, if known
    problem: str | None = None  # why the patch cannot be armed


def packages(patch: Patch) -> set[str]:
    """Return the top-level packages of the patch's targets."""
    return {target.partition(":")[0].partition(".")[0] for target in patch.targets}


def module_of(target: str) -> str:
    """Return ``"package.module"`` of ``"package.module:Qual.name"``."""
    return target.partition(":")[0]


def examine(patch: Patch, root_for: RootFor = contract.installed_root) -> Findings:
    """Check version, contract and rival distributions, without importing the framework.

    ``root_for`` is `flashpatch.contracts.contract.installed_root`, or one that remembers its answers."""
    package = next((p for p in sorted(packages(patch)) if root_for(p) is not None), None)
    if package is None:
        return Findings(problem=f"{', '.join(sorted(packages(patch)))} is not installed")
    installed = versions.owner(package, root_for)
    if installed is None:
        return Findings(problem=f"the version of {package} is unknown: no installed distribution owns it")
    outside = _outside(patch, installed, root_for)
    if outside is not None:
        return Findings("", installed, outside)
    held = verdict_cache.check(patch, root_for, installed.version)
    if not held.ok:
        return Findings(held.target, installed, f"contract: {held.drift}")
    return Findings(held.target, installed, next(_rivals(patch), None))


def other_generation(
    patches: Iterable[Patch], framework: str, root_for: RootFor = contract.installed_root
) -> str | None:
    """Return the framework name whose patches are for the installed version, if those of ``framework`` are for another.

    Of the ``patches`` of one family; ``framework`` as in ids, such as ``sglang_0_5_12``, whose sibling is ``sglang``."""
    base = framework.rstrip("_0123456789")
    members = [patch for patch in patches if patch.base_framework == base]
    if len({patch.framework for patch in members}) == 1:
        return None
    siblings: dict[str, bool] = {}  # whether the installed version is within what the records ask for
    for patch in members:
        installed = [versions.owner(package, root_for) for package in packages(patch)]
        is_meant = any(one is not None and _outside(patch, one, root_for) is None for one in installed)
        siblings[patch.framework] = siblings.get(patch.framework, True) and is_meant
    if siblings.pop(framework):
        return None
    return next((name for name, meant in siblings.items() if meant), None)


def _outside(patch: Patch, installed: versions.Installed, root_for: RootFor) -> str | None:
    """Return how a version, of the patched framework or beside it, misses what the record asks for."""
    if not versions.satisfies(patch.requires, installed.version):
        return f"{installed} does not meet {patch.requires}"
    if patch.beside:
        other = versions.owner(Requirement(patch.beside).name, root_for)
        if other is None or not versions.satisfies(patch.beside, other.version):
            return f"{other or 'an environment without it'} does not meet {patch.beside}"
    return None


def _rivals(patch: Patch) -> Iterator[str]:
    """Return what conflicts with the patch: an installed distribution, or a module imported here."""
    for name in patch.conflicts:
        if any(metadata.distributions(name=name)):
            yield f"conflicts with distribution {name}"
        elif sys.modules.get(name) is not None:
            yield f"conflicts with {name}, which is active in this process"
