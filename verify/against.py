"""Check every contract against framework versions that are not installed, from their source alone, and report drift."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flashpatch.arming.preflight import packages
from flashpatch.contracts import versions
from flashpatch.contracts.contract import check
from flashpatch.record import Patch
from flashpatch.verify.trees import Tree, opened

Verdict = Literal["holds", "drifted", "outside"]
NO_DRIFT, DRIFT, UNREADABLE = 0, 1, 2


@dataclass(frozen=True)
class Cell:
    """One patch against one version.

    ``verdict`` is ``outside`` where the version does not meet the patch's ``requires``; ``line`` is the
    first place that drifted and ``drift`` all of them, in words.
    """

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


def against(paths: Iterable[Path], patches: Sequence[Patch]) -> list[Cell]:
    """Every patch against every version found in ``paths``, path by path.

    Raises:
        ValueError: a path holds no source of a framework that the patches are for.
    """
    wanted = {package for patch in patches for package in packages(patch)}
    cells: list[Cell] = []
    for path in paths:
        with opened(path, wanted) as trees:
            cells += [_cell(p, tree) for tree in trees for p in patches if tree.package in packages(p)]
    return cells


def _cell(patch: Patch, tree: Tree) -> Cell:
    tested = patch.tested_on(tree.version)
    if tree.version != "unknown" and not versions.satisfies(patch.requires, tree.version):
        return Cell(patch.id, tree.distribution, tree.version, "outside", tested)
    result = check(patch, {tree.package: tree.root}.get, tree.version)
    verdict: Verdict = "holds" if result.ok else "drifted"
    line = "" if result.ok else result.line
    return Cell(patch.id, tree.distribution, tree.version, verdict, tested, line, result.drift)


@dataclass(frozen=True)
class DriftReport:
    """What became of every contract, and the paths that could not be checked.

    Attributes:
        cells: each patch on each version.
        unreadable: each path with what is wrong with it, to be read as one sentence.
    """

    cells: tuple[Cell, ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def drifted(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.verdict == "drifted"]

    @property
    def exit_status(self) -> int:
        """2 if a path could not be read, 1 if a contract drifted, else 0."""
        if self.unreadable:
            return UNREADABLE
        return DRIFT if self.drifted else NO_DRIFT

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.exit_status == NO_DRIFT,
            "cells": [asdict(cell) for cell in self.cells],
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable],
        }


def survey(paths: Sequence[Path], patches: Sequence[Patch]) -> DriftReport:
    """Check every patch against every version found in ``paths``; a path that cannot be read stops no other."""
    cells: list[Cell] = []
    unreadable: list[tuple[str, str]] = []
    for path in paths:
        try:
            cells += against([path], patches)
        except (OSError, ValueError) as error:
            unreadable.append((str(path), str(error).removeprefix(f"{path} ")))
    return DriftReport(tuple(cells), tuple(unreadable))
