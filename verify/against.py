"""Check every contract against framework versions that are not installed, from their source alone, and report drift."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import Version

from flashpatch.arming.preflight import packages
from flashpatch.contracts import contract, versions
from flashpatch.contracts.source import Sources
from flashpatch.record import Patch

Verdict = Literal["holds", "drifted", "outside"]


@dataclass(frozen=True)
class Cell:
    """One patch against one version.

    ``verdict`` is ``outside`` where the version does not meet the patch's ``requires``; ``line`` is the
    first place that drifted and ``drift`` all of them, in words."""

    patch: str
    distribution: str
    version: str
    verdict: Verdict
    tested: bool
    line: str = ""
    drift: str = ""

    @property
    def of(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def text(self) -> str:
        return f"drifted({self.line})" if self.verdict == "drifted" else self.verdict


def _cell(patch: Patch, tree: Tree) -> Cell:
    tested = patch.tested_on(tree.version)
    found = Cell(patch.id, tree.distribution, tree.version, "outside", tested)
    if tree.version != "unknown" and not versions.satisfies(patch.requires, tree.version):
        return found
    result = contract.check(patch, Sources({tree.package: tree.root}.get), tree.version)
    return replace(found, verdict="holds" if result.ok else "drifted", line=result.line, drift=result.drift)


@dataclass(frozen=True)
class DriftReport:
    """What became of every contract; each path that cannot be read, and each that holds nothing of what is patched, with what
    is wrong with it, to be read as one sentence."""

    cells: tuple[Cell, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    empty: tuple[tuple[str, str], ...] = ()

    @property
    def exit_status(self) -> int:
        """2 if a path cannot be read, else 1 if a contract drifted, else 3 if a path holds nothing of it, else 0."""
        drifted = any(cell.verdict == "drifted" for cell in self.cells)
        return 2 if self.unreadable else 1 if drifted else 3 * bool(self.empty)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.exit_status,
            "cells": [asdict(cell) for cell in self.cells],
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable],
            "empty": [path for path, _ in self.empty],
        }


def survey(paths: Sequence[Path], patches: Sequence[Patch]) -> DriftReport:
    """Check every patch against every version found in ``paths``; a path that cannot be read stops no other."""
    wanted = {package for patch in patches for package in packages(patch)}
    cells: list[Cell] = []
    unreadable, empty = list[tuple[str, str]](), list[tuple[str, str]]()
    for path in paths:
        try:
            with opened(path, wanted) as trees:
                cells += [_cell(p, tree) for tree in trees for p in patches if tree.package in packages(p)]
                empty += [] if trees else [(str(path), f"holds none of {', '.join(sorted(wanted))}")]
        except (OSError, ValueError) as error:
            unreadable.append((str(path), str(error).removeprefix(f"{path} ")))
    return DriftReport(tuple(cells), tuple(unreadable), tuple(empty))


@dataclass(frozen=True)
class Tree:
    """Source of one top-level package: the distribution and version it belongs to, and its directory."""

    distribution: str
    version: str
    package: str
    root: Path


@contextlib.contextmanager
def opened(path: Path, packages: Collection[str]) -> Iterator[list[Tree]]:
    """Yield the sources of ``packages`` that ``path`` holds; those of archives exist inside the context only.

    Raises ValueError if it is neither an archive nor a directory."""
    with contextlib.ExitStack() as stack:
        folder = path
        if path.is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashpatch-against-")))
            _unpack(path, folder)
        elif not path.is_dir():
            raise ValueError(f"{path} is neither a wheel, an sdist nor a directory")
        yield [tree for package in sorted(packages) for tree in _find(folder, package)]


def _unpack(archive: Path, folder: Path) -> None:
    """Extract Python sources and metadata; both extractors keep members inside ``folder``. Raises ValueError if that fails."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if _is_wanted(name)])
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as sdist:
                members = [member for member in sdist if member.isfile() and _is_wanted(member.name)]
                sdist.extractall(folder, members, filter="data")
        else:
            raise ValueError(f"{archive} is neither a wheel nor an sdist")
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error


def _is_wanted(name: str) -> bool:
    return name.endswith((".py", "/METADATA", "/RECORD", "/top_level.txt", "PKG-INFO"))


def _find(folder: Path, package: str) -> Iterator[Tree]:
    """``package`` in a site-packages, at the top or in ``src`` or ``python`` of a project, or one below, as
    sdists are; or ``folder`` is the package itself."""
    if folder.name == package and (folder / "__init__.py").is_file():
        folder = folder.parent
    inner = [path for path in folder.iterdir() if path.is_dir()]
    for project in (folder, *(inner if len(inner) == 1 else ())):
        for home in (project, project / "src", project / "python"):
            root = home / package
            if root.is_dir() and any(root.glob("*.py")):
                distribution, version = _identity(home, project, package)
                yield Tree(distribution, version, package, root)
                return


def _identity(home: Path, project: Path, package: str) -> tuple[str, str]:
    """Name and version from the metadata beside the package, else from the project's ``PKG-INFO`` or pyproject.toml."""
    named = canonicalize_name(package)
    beside = [found for found in metadata.distributions(path=[str(home)]) if found.metadata["Name"]]
    beside.sort(key=lambda found: not canonicalize_name(found.metadata["Name"]).startswith(named))
    for found in beside:
        if any(file.parts[0] == package for file in found.files or ()):
            return found.metadata["Name"], found.version
    if (project / "PKG-INFO").is_file():
        headers = HeaderParser().parsestr((project / "PKG-INFO").read_text(errors="replace"))
        return headers["Name"] or package, headers["Version"] or "unknown"
    return _stated(project, package)


def _stated(project: Path, package: str) -> tuple[str, str]:
    """Name and version that a checkout's pyproject.toml states, itself or by naming a file that holds nothing else; "unknown"
    if the version is computed while the project is built, from its tags for example."""
    try:
        data = tomllib.loads((project / "pyproject.toml").read_text())
        stated = data["project"]
        file = data.get("tool", {}).get("setuptools", {}).get("dynamic", {}).get("version", {}).get("file")
        if "version" not in stated and file is not None:
            [file] = [file] if isinstance(file, str) else file
            stated["version"] = str(Version((project / file).read_text().strip()))
        return str(stated["name"]), str(stated.get("version", "unknown"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return package, "unknown"
