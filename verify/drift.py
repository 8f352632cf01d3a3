"""Report which contracts drifted over several versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpatch.record import Patch
from flashpatch.verify.against import Cell, against

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
