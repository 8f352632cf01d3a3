"""Say of each name that the user typed where it acted in a job, how often, on which policy, and whether that is proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashpatch import registry
from flashpatch.ledger.runs import Row

if TYPE_CHECKING:
    from flashpatch.verify.live import LiveReport

_OWN_ROLES = ("trainer", "engine-core", "worker")
"""Roles that say more of a process than the class of its actor."""


@dataclass(frozen=True)
class Acted:
    """Hold in how many processes of one kind a name acted, of how many there are."""

    kind: str
    acted: int
    of: int

    def __str__(self) -> str:
        plural = "s" if self.of > 1 and self.kind.islower() else ""
        return f"{self.acted} of {self.of} {self.kind.replace('-', ' ')}{plural}"


@dataclass(frozen=True)
class TypedName:
    """Hold what became of one name.

    Attributes:
        name: as the user typed it.
        family: the family that it stands for.
        acted: by kind of process: a role, or the class of an actor of Ray.
        calls: of all its patches, in all processes.
        versions: policy versions that processes hold in which it acted.
        precision: of the rollouts; empty if the family has none.
        problems: number of sentences about it.
        verdict: ``proven``, ``not proven``, or ``never called``, though nothing of it was due yet.
    """

    name: str
    family: str
    acted: tuple[Acted, ...]
    calls: int
    versions: tuple[int, ...]
    precision: str
    problems: int
    verdict: str

    @property
    def where(self) -> str:
        return ", ".join(map(str, self.acted)) or "nowhere"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of `COLUMNS`."""
        return (
            self.name,
            self.where,
            str(self.calls),
            ", ".join(map(str, self.versions)),
            self.precision,
            self.verdict,
        )


COLUMNS = ("name", "acted in", "calls", "policy versions", "precision", "verdict")


def typed_names(rows: list[Row], report: LiveReport) -> list[TypedName]:
    """Return one entry per name that is on in the job, in the order of their families.

    Args:
        rows: the job's processes.
        report: the verdict on it.
    """
    there = Counter(kind for process in report.processes for kind in kinds(process.roles, process.title))
    return [_name(family, rows, report, there) for family in report.typed]


def idle(names: Iterable[TypedName]) -> list[str]:
    """Return a sentence per name that is on and acted nowhere: nothing proves it."""
    return [f"{name.name} was called in no process" for name in names if name.verdict == "never called"]


def kinds(roles: Iterable[str], title: str) -> set[str]:
    """Return what a process is: its roles; the class of its actor if they do not say more than that."""
    found = set(roles)
    if title and not found & set(_OWN_ROLES):
        return {title}
    return found or {"process"}


def _name(family: str, rows: list[Row], report: LiveReport, there: Counter[str]) -> TypedName:
    calls, acted, versions = 0, Counter[str](), set[int]()
    for process in report.processes:
        mine = sum(patch["calls"] for id, patch in process.patches.items() if id.partition(".")[0] == family)
        if mine:
            calls += mine
            acted.update(kinds(process.roles, process.title))
            versions |= {process.version} - {None}
    problems = len(report.by_family.get(family, ()))
    return TypedName(
        name=report.typed[family],
        family=family,
        acted=tuple(
            Acted(kind, acted[kind], there[kind])
            for kind in sorted(acted, key=lambda kind: (kind not in _OWN_ROLES, kind))
        ),
        calls=calls,
        versions=tuple(sorted(versions)),
        precision=_precision(family, rows),
        problems=problems,
        verdict="not proven" if problems else "proven" if calls else "never called",
    )


def _precision(family: str, rows: list[Row]) -> str:
    """Return the precision of rollouts; several if processes differ."""
    record = registry.families().get(family)
    if record is None or "precision" not in record.options:
        return ""
    on = [row for row in rows if family in row.on]
    noted = {str(row.notes["precision"]) for row in on if row.notes.get("precision")}
    default = record.options["precision"].default
    told = {str(row.on[family]["options"].get("precision", default)) for row in on}
    return ", ".join(sorted(noted or told))
