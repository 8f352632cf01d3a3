"""Judge a job from its ledger: which processes carry which patches, which should but do not, and where each name acted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashpatch import registry
from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.patch_status import is_absent
from flashpatch.record import Patch
from flashpatch.verify import due, policy_versions
from flashpatch.verify.due import Situation

_OWN_ROLES = ("trainer", "engine-core", "worker")
"""Roles that say more of a process than the class of its actor."""
COLUMNS = ("name", "acted in", "calls", "last version", "precision", "verdict")


@dataclass(frozen=True)
class Process:
    """One process of a job, present or missing.

    ``patches`` maps ids to ``{"state", "detail", "calls", ...}`` as the process wrote them. ``problems``
    holds one sentence per thing that is required here and not live. ``node`` names the node of Ray that its row
    was published on, ``title`` the class of the actor of Ray that it is; each is empty if there is none. ``names`` are what
    the user typed for ``families``; ``version`` is that of the policy that it holds."""

    host: str
    pid: int
    roles: tuple[str, ...]
    rank: Mapping[str, Any]
    alive: bool | None
    present: bool
    families: tuple[str, ...]
    patches: Mapping[str, Mapping[str, Any]]
    problems: tuple[str, ...]
    node: str = ""
    title: str = ""
    names: tuple[str, ...] = ()
    version: int | None = None
    start: str = ""

    @property
    def name(self) -> str:
        what = " ".join(filter(None, ("+".join(self.roles), self.title))) or "process"
        return f"{what} {self.host}:{self.pid}" + (f" on {self.node}" if self.node else "")

    @property
    def verdict(self) -> str:
        return "missing" if not self.present else "not proven" if self.problems else "ok"

    @property
    def lives(self) -> str:
        return {True: "yes", False: "no", None: "unknown"}[self.alive]

    @property
    def calls(self) -> int:
        return sum(patch["calls"] for patch in self.patches.values())


@dataclass(frozen=True)
class LiveReport:
    """The verdict on one run, with what the user typed for each family that is asked about, and the problems that are its own."""

    run: str
    processes: tuple[Process, ...]
    problems: tuple[str, ...]
    typed: Mapping[str, str] = field(default_factory=dict)
    by_family: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return what there is as JSON has it. Patches are not copied: of a thousand processes that takes a second."""
        return {"ok": self.ok, **vars(self), "processes": [dict(vars(process)) for process in self.processes]}


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
    """Hold what became of one name, as the user typed it.

    It acted in so many processes of a kind (a role, or the class of an actor of Ray), with ``calls`` of all its patches, under
    the policy ``versions`` that these hold. The ``precision`` is that of the rollouts, empty if the family has none,
    ``problems`` a number of sentences. The verdict is ``proven``, ``not proven``, or ``never called``, though nothing of it was
    due yet."""

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
        versions = ", ".join(str(version or "0 (none complete)") for version in self.versions)
        return self.name, self.where, str(self.calls), versions, self.precision, self.verdict


def judge(run: Run, patches: Mapping[str, Patch], required: Mapping[str, str] | None = None) -> LiveReport:
    """Compare what each process shows with what is due in it.

    What others write than ``patches`` is shown, and judged by its state alone. ``required`` are the families that the job must
    carry, each with the name to report it by; others in the ledger are left out. Empty means all."""
    named = required or {}
    carried = {family for row in run.rows for family in _families(row.patches)}
    chosen = set(named) or carried | {name for expected in run.expected for name in expected.families}
    situations = due.situations(run.rows, patches)
    expected: dict[tuple[str, int], list[Expected]] = defaultdict(list)
    for one in run.expected:
        expected[one.host, one.pid].append(one)
    processes = []
    for row, at in zip(run.rows, situations, strict=True):
        near = [one for one in expected[row.host, row.pid] if one.matches(row)]
        processes.append(_present(row, near, at, patches, chosen, named))
    processes += [_missing(expected) for expected in run.missing if chosen & set(expected.families)]
    problems = [f"{process.name}: {problem}" for process in processes for problem in process.problems]
    problems += [f"no process carries {named[family]}" for family in sorted(set(named) - carried)]
    problems += due.not_seen_anywhere(run.rows, situations, chosen, patches)
    split = policy_versions.splits(run.rows, patches)
    problems += [*split, *run.problems]
    rows = reversed(run.rows)
    on = [(family, one.get("name", family)) for row in rows for family, one in row.on.items()]
    said = dict(on)
    problems += [
        f"no process carries {name}: {said[family]} is on"
        for family, name in named.items()
        if family in said and (family, name) not in on
    ]
    shown = sorted(chosen & (carried | set(named)))
    typed = {family: named.get(family) or said.get(family, family) for family in shown}
    by_family = {}
    for family in typed:
        about = [problem for problem in problems if _is_about(problem, family, named.get(family, family))]
        by_family[family] = (*about, *(split if family == policy_versions.FAMILY else ()))
    return LiveReport(run.id, tuple(processes), tuple(problems), typed, by_family)


def _is_about(problem: str, family: str, name: str) -> bool:
    """Whether a problem names a patch of a family, or the family if it says that it is missing."""
    words = (f" {family}.", f"[flashpatch: {family}", f" no {name} patch", f"carries {name}")
    missing = problem.partition(" expected one with ")[2].partition(":")[0].split(", ")
    return family in missing or any(word in problem for word in words)


def _present(
    row: Row,
    expectations: Collection[Expected],
    at: Situation,
    patches: Mapping[str, Patch],
    families: set[str],
    named: Mapping[str, str],
) -> Process:
    roles = {*row.roles, *(role for expected in expectations for role in expected.roles)}
    written = {id: patch for id, patch in row.patches.items() if id.split(".")[0] in families}
    present = _families(written)
    promised = {family for expected in expectations for family in expected.families}
    needed = {patch.family for patch in patches.values() if roles & patch.scope}
    problems = [
        f"carries no {named.get(family, family)} patch, though one is expected"
        for family in sorted(promised & families - present)
    ]
    problems += [
        f"carries no {named.get(family, family)} patch, though its role needs one"
        for family in sorted(needed & families - present - promised)
    ]
    for id, patch in sorted(written.items()):
        problems += _fault(id, patch)
    late = row.notes.get("late", {})
    problems += [f"[flashpatch: {family}] {late[family]}" for family in sorted(families) if late.get(family)]
    broken = "its last update failed" if row.notes.get("policy_state") == "broken" else ""
    if why := policy_versions.FAMILY in families and (row.notes.get("refusing") or broken):
        problems.append(f"[flashpatch: {policy_versions.FAMILY}] refuses requests: {why}")
    problems += due.not_seen(row, written, roles, at, patches)
    problems += [row.error] if row.error else []
    return Process(
        host=row.host,
        pid=row.pid,
        roles=tuple(sorted(roles)),
        rank=row.rank,
        alive=row.alive,
        present=True,
        families=tuple(sorted(present)),
        patches=written,
        problems=tuple(problems),
        node=row.node.label if row.node is not None else "",
        title=row.title,
        names=tuple(row.on[family]["name"] if family in row.on else family for family in sorted(present)),
        version=row.notes.get("policy_version"),
        start=row.start,
    )


def _missing(expected: Expected) -> Process:
    causes = ["the environment did not reach it, or flashpatch is not installed there"]
    if not expected.alive:
        causes.insert(0, "it ended before it imported the framework")
    problem = (
        f"wrote no row, though process {expected.by} expected one with {', '.join(expected.families)}: "
        + ", or ".join(causes)
    )
    who = dict(host=expected.host, pid=expected.pid, roles=expected.roles, rank={}, alive=expected.alive)
    return Process(**who, present=False, families=(), patches={}, problems=(problem,))


def _fault(id: str, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a patch whatever is due."""
    word, detail = written["state"], written.get("detail") or "no reason given"
    if word in ("failed", "displaced"):
        yield f"{id} is {word}: {detail}"
    elif word == "skipped" and not is_absent(word, detail):
        yield f"{id} is skipped: {detail}"


def _families(patches: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {id.split(".")[0] for id, patch in patches.items() if patch["state"] != "disabled"}


def typed_names(rows: list[Row], report: LiveReport) -> list[TypedName]:
    """Return one entry per name that is on in the job, in the order of their families, from its rows and the verdict on it."""
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
    order = sorted(acted, key=lambda kind: (kind not in _OWN_ROLES, kind))
    return TypedName(
        name=report.typed[family],
        family=family,
        acted=tuple(Acted(kind, acted[kind], there[kind]) for kind in order),
        calls=calls,
        versions=tuple(sorted(versions)),
        precision=_precision(family, rows),
        problems=problems,
        verdict="not proven" if problems else "proven" if calls else "never called",
    )


def _precision(family: str, rows: list[Row]) -> str:
    record = registry.families().get(family)
    if record is None or "precision" not in record.options:
        return ""
    on = [row for row in rows if family in row.on]
    noted = {str(row.notes["precision"]) for row in on if row.notes.get("precision")}
    default = record.options["precision"].default
    told = {str(row.on[family]["options"].get("precision", default)) for row in on}
    return ", ".join(sorted(noted or told))
