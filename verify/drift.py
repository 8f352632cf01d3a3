"""Report which contracts drifted over several versions, as JSON or as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpatch.record import Patch
from flashpatch.verify.against import Cell, against
from flashpatch.verify.compatibility import matrix, order

NO_DRIFT, DRIFT, UNREADABLE = 0, 1, 2


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
            "cells": [cell.as_json() for cell in self.cells],
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable],
        }

    def markdown(self) -> str:
        """A headline, a line per version, every drift with its place, and the full table folded away."""
        parts = [f"# {self._headline()}"]
        if self.cells:
            parts.append("\n".join(self._summary()))
        for version in _versions(self.drifted):
            lines = [self._item(cell) for cell in self.drifted if cell.of == version]
            parts.append("\n".join([f"## Drift in {version}", "", *lines]))
        if self.unreadable:
            lines = [f"- `{path}` {escape(reason)}" for path, reason in self.unreadable]
            parts.append("\n".join(["## Not read", "", *lines]))
        for distribution in sorted({cell.distribution for cell in self.cells}):
            table = matrix([cell for cell in self.cells if cell.distribution == distribution])
            summary = f"<summary>Every patch on {distribution}</summary>"
            parts.append("\n".join(["<details>", summary, "", *table, "", "</details>"]))
        return "\n\n".join(parts) + "\n"

    def _headline(self) -> str:
        versions = _counted(len(_versions(self.cells)), "version")
        drift = _counted(len(self.drifted), "contract") + " drifted" if self.drifted else "no drift"
        unread = f", {_counted(len(self.unreadable), 'path')} not read" if self.unreadable else ""
        return f"Contracts on {versions}: {drift}{unread}"

    def _summary(self) -> Iterator[str]:
        yield "| version | tested | holds | drifted | outside | refused there |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for version in _versions(self.cells):
            cells = [cell for cell in self.cells if cell.of == version]
            count = Counter("tested" if c.verdict == "holds" and c.tested else c.verdict for c in cells)
            groups = sorted({f"`{_group(cell)}`" for cell in cells if cell.verdict == "drifted"})
            refused = ", ".join(groups) or ("no patch is for it" if count["outside"] == len(cells) else "")
            numbers = (str(count[word]) for word in ("tested", "holds", "drifted", "outside"))
            yield f"| {' | '.join([version, *numbers, refused])} |"

    def _item(self, drifted: Cell) -> str:
        others = [
            cell.version
            for cell in self.cells
            if (cell.patch, cell.distribution, cell.verdict) == (drifted.patch, drifted.distribution, "holds")
        ]
        holds = f" Holds in {', '.join(sorted(set(others), key=order))}." if others else ""
        return f"- `{drifted.patch}`: {escape(drifted.drift)}.{holds}"


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


def escape(text: str) -> str:
    """``text`` with what Markdown reads as markup escaped; names as ``__init__`` would turn bold."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def _versions(cells: Sequence[Cell]) -> list[str]:
    """Each distribution with its version, by name, then by version."""
    found = {cell.of: (cell.distribution, order(cell.version)) for cell in cells}
    return sorted(found, key=lambda of: found[of])


def _group(cell: Cell) -> str:
    """``family.framework``: the patches that are refused together."""
    return ".".join(cell.patch.split(".")[:2])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
