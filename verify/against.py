"""Check every contract against framework versions that are not installed, from their source alone."""

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
