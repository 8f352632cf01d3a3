"""Judge a job from its ledger: which processes carry which patches, which should but do not, and where each name acted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashpatch import registry
from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.patch_status import is_absent
from flashpatch.record import Patch
from flashpatch.verify import due, ends, policy_versions, statements
from flashpatch.verify.due import Situation
from flashpatch.verify.statements import Stated

_OWN_ROLES = ("trainer", "engine-core", "worker")
"""Roles that say more of a process than the class of its actor."""
COLUMNS = ("name", "acted in", "calls", "last version", "precision", "verdict")
PROVEN, NOT_PROVEN, NOT_YET = "proven", "not proven", "not yet"
_STARTING = "wrote no row yet: it has imported no framework so far, or flashpatch is not installed there"
NOTHING_DUE, NOTHING_ON, NOT_SEEN = "nothing to prove", "nothing on", "not seen"


@dataclass(frozen=True)
class Process:
    """One process of a job, present or missing.

    ``patches`` maps ids to ``{"state", "detail", "calls", ...}`` as the process wrote them. ``problems``
    holds one sentence per thing that is required here and not live. ``node`` names the node of Ray that its row
    was published on, ``title`` the class of the actor of Ray that it is; each is empty if there is none. ``names`` are what
    the user typed for ``families``; ``version`` is that of the policy that it holds, ``ended`` how it ended, see
    `ends`, ``by_family`` the calls of each family's patches, ``states`` how many patches
    are in which state, without those for what is not installed."""

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
    ended: str = ""
    by_family: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, str]:
        return self.host, self.pid, self.start

    @property
    def verdict(self) -> str:
        if not self.present:
            return "missing" if self.problems else NOT_YET
        return NOT_PROVEN if self.problems else "ok"

    @property
    def lives(self) -> str:
        return "no" if ends.is_over(self.ended) else {True: "yes", False: "no", None: "unknown"}[self.alive]

    @property
    def how(self) -> str:
        return self.ended or {True: ends.RUNNING, False: "gone", None: ends.LOST}[self.alive]

    @property
    def calls(self) -> int:
        return sum(self.by_family.values())


@dataclass(frozen=True)
class LiveReport:
    """The verdict on one run: all that shows it is told, by every command that asks.

    ``typed`` has what the user typed for each family that is asked about, ``by_family`` the problems that are its own,
    ``stated`` what the names did, ``remarks`` what processes noted as off, refused or a problem, and which of these, ``ended`` how the job ended."""

    run: str
    processes: tuple[Process, ...]
    problems: tuple[str, ...]
    typed: Mapping[str, str] = field(default_factory=dict)
    by_family: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stated: tuple[Stated, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    ended: str = ""
    names: tuple[TypedName, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict == PROVEN

    @property
    def verdict(self) -> str:
        """What all commands say of the run: `PROVEN` if each name is, else the worst of them."""
        words = {self.of(family) for family in self.typed} | ({NOT_PROVEN} if self.problems else set())
        order = NOT_PROVEN, NOT_YET, NOTHING_DUE, PROVEN
        return next((word for word in order if word in words), NOTHING_ON)

    @property
    def lines(self) -> tuple[str, ...]:
        """What keeps the run from being proven: its problems, each name of which nothing was due, and who wrote no row yet."""
        idle = [family for family in self.typed if self.of(family) == NOTHING_DUE]
        said = [f"{self.typed[family]}: {NOTHING_DUE}: nothing of it was due in this job" for family in idle]
        none = "nothing on in this run: no name was switched on, so nothing is proven"
        said += [f"{called_by(one)}: {_STARTING}" for one in self.processes if one.verdict == NOT_YET]
        return (*self.problems, *said, *([none] if self.verdict == NOTHING_ON else []))

    def of(self, family: str) -> str:
        """Return the verdict on one family. In a ledger of a FlashPatch that noted less, what was not seen is no word."""
        mine = [one for one in self.stated if one.family == family]
        if self.by_family.get(family) or not mine:
            return NOT_PROVEN if self.by_family.get(family) else NOTHING_DUE
        awaited = any(one.verdict == NOT_YET and family in one.families for one in self.processes)
        is_whole = not self.ended or all(one.seen for one in mine)
        return PROVEN if is_whole and not awaited else NOT_YET

    def as_json(self) -> dict[str, Any]:
        """Return what there is as JSON has it."""
        processes = [vars(one) | {"patches": dict(one.patches)} for one in self.processes]
        told = {"verdict": self.verdict, "problems": self.lines, "stated": [vars(one) for one in self.stated]}
        names = [asdict(name) for name in self.names]
        return {"ok": self.ok, **vars(self), "processes": processes, "names": names, **told}


@dataclass(frozen=True)
class TypedName:
    """Hold what became of one name, as the user typed it.

    ``acted`` says in how many processes of each kind (a role, or the class of an actor of Ray), with ``calls`` of all its patches,
    under the policy ``versions`` that these hold. The ``precision`` is that of the rollouts, empty if the family has none,
    ``problems`` a number of sentences; the verdict is `LiveReport.of`."""

    name: str
    family: str
    acted: str
    calls: int
    versions: tuple[int, ...]
    precision: str
    problems: int
    verdict: str

    def cells(self) -> tuple[str, ...]:
        versions = ", ".join(str(version or "0 (as opened)") for version in self.versions)
        return self.name, self.acted, str(self.calls), versions, self.precision, self.verdict


def judge(run: Run, patches: Mapping[str, Patch], required: Mapping[str, str] | None = None) -> LiveReport:
    """Compare what each process shows with what is due in it, and the job with what its names state.

    What others write than ``patches`` is shown, and judged by its state alone. ``required`` are the families that the job must
    carry, each with the name to report it by; others in the ledger are left out. Empty means all."""
    named, carried, ended = required or {}, due.carried(run.rows), ends.of_job(run.rows)
    chosen = set(named) or carried | {name for expected in run.expected for name in expected.families}
    situations = due.situations(run.rows, patches)
    processes, dues, once = _processes(run, situations, patches, chosen, named)
    on = [(family, one.get("name", family)) for row in reversed(run.rows) for family, one in row.on.items()]
    said, shown = dict(on), sorted(chosen & (carried | set(named)))
    typed = {family: named.get(family) or said.get(family, family) for family in shown}
    stated = tuple(statements.of_job(typed, run.rows, situations, dues))
    split = policy_versions.splits(run.rows, patches)
    others = {name: said[one] for one, name in named.items() if one in said and (one, name) not in on}
    unseen = [one for one in stated if not one.seen and ends.is_over(ended)]
    problems = [
        *_ends(run.rows, ended),
        *(f"{typed[one.family]}: not seen: {one.what}, though {one.asked}" for one in unseen),
        *(f"{called_by(process)}: {problem}" for process in processes for problem in process.problems),
        *(f"no process carries {named[family]}" for family in sorted(set(named) - carried)),
        *(text for _, text in sorted(once.items())),
        *split,
        *run.problems,
        *(f"no process carries {name}: {own} is on" for name, own in others.items()),
    ]
    by_family = {
        own: tuple(one for one in problems if _is_about(one, own, name, named.get(own, own), split))
        for own, name in typed.items()
    }
    remarks = tuple(one for row in run.rows for one in statements.remarks(called_by(row), row))
    found = LiveReport(run.id, tuple(processes), tuple(problems), typed, by_family, stated, remarks, ended)
    return replace(found, names=tuple(_name(family, run.rows, found) for family in typed))


def _processes(
    run: Run,
    situations: Sequence[Situation],
    patches: Mapping[str, Patch],
    chosen: set[str],
    named: Mapping[str, str],
) -> tuple[list[Process], dict[str, tuple[int, int]], dict[str, str]]:
    """Return what each process shows, of each family the dues and how many of them were seen, and by patch a sentence on what is
    due once in the job and was seen nowhere. Processes that are alike are judged once."""
    expected: dict[tuple[str, int], list[Expected]] = defaultdict(list)
    for one in run.expected:
        expected[one.host, one.pid].append(one)
    alike: dict[Any, _Shown] = {}
    found, dues, seen, once = list[Process](), Counter[str](), Counter[str](), dict[str, str]()
    for row, at in zip(run.rows, situations, strict=True):
        near = [one for one in expected[row.host, row.pid] if one.matches(row)]
        roles = {*row.roles, *(role for one in near for role in one.roles)}
        own = row.parts[0].items()  # where a patch is live, the detail says how often it was called
        states = [
            (id, one["state"], one["calls"] > 0, one["state"] != "live" and one.get("detail"))
            for id, one in own
        ]
        key = row.idle, tuple(states), frozenset(roles), at.happened, at.facts.child, id(at.options)
        if key not in alike:
            alike[key] = _shown(row, roles, at, patches, chosen)
        dues.update(alike[key].dues)
        seen.update(alike[key].seen)
        once |= alike[key].once
        found.append(_present(row, near, roles, alike[key], chosen, named))
    found += [_missing(expected) for expected in run.missing if chosen & set(expected.families)]
    return found, {family: (dues[family], seen[family]) for family in dues}, once


def _is_about(problem: str, family: str, typed: str, name: str, split: Sequence[str]) -> bool:
    """Whether a problem names a patch of a family or its typed name, or the family if it says that it is missing; ``split`` are those
    of policy versions."""
    if problem.startswith(f"{typed}: ") or (problem in split and family == policy_versions.FAMILY):
        return True
    words = (f" {family}.", f"[flashpatch: {family}", f" no {name} patch", f"carries {name}")
    missing = problem.partition(" expected one with ")[2].partition(":")[0].split(", ")
    return family in missing or any(word in problem for word in words)


@dataclass
class _Shown:
    """Hold what processes alike show: the families that they carry and need, problems, by family how much was due and how much
    of it was seen, and by patch a sentence on what is due once in the job and was seen nowhere."""

    present: set[str]
    needed: set[str]
    problems: list[str] = field(default_factory=list)
    dues: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    once: dict[str, str] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)


def _shown(
    row: Row, roles: set[str], at: Situation, patches: Mapping[str, Patch], families: set[str]
) -> _Shown:
    written = {id: patch for id, patch in row.patches.items() if id.split(".")[0] in families}
    needed = {patch.family for patch in patches.values() if roles & patch.scope}
    found = _Shown({id.split(".")[0] for id in written}, needed)
    for id, patch in sorted(written.items()):
        found.problems += _fault(id, patch)
        if not is_absent(patch["state"], patch.get("detail") or ""):
            found.states[patch["state"]] += 1
    for one, problem in due.owed(row, written, roles, at, patches):
        called = not problem and one.shown_by(at.facts.anywhere if one.in_job else at.facts.called)
        found.dues[one.patch.family] += called or bool(problem)
        found.seen[one.patch.family] += called
        if problem and one.in_job:
            found.once.setdefault(one.patch.id, problem)
        elif problem:
            found.problems.append(problem)
    return found


def _present(
    row: Row,
    expectations: Collection[Expected],
    roles: set[str],
    shown: _Shown,
    families: set[str],
    named: Mapping[str, str],
) -> Process:
    promised = {family for expected in expectations for family in expected.families}
    absent = families - shown.present
    told, owed = sorted(promised & absent), sorted(shown.needed & absent - promised)
    problems = [f"carries no {named.get(one, one)} patch, though one is expected" for one in told]
    on = ", ".join(one.get("name", family) for family, one in row.on.items()) or "nothing"
    lacking = f"though its role needs one; switched on in it: {on}"
    problems += [f"carries no {named.get(one, one)} patch, {lacking}" for one in owed]
    late = row.notes.get("late", {})
    problems += [f"[flashpatch: {family}] {late[family]}" for family in sorted(families) if late.get(family)]
    broken = "its last update failed" if row.notes.get("policy_state") == "broken" else ""
    if why := policy_versions.FAMILY in families and (row.notes.get("refusing") or broken):
        problems.append(f"[flashpatch: {policy_versions.FAMILY}] refuses requests: {why}")
    problems += [*shown.problems, *filter(None, (row.error, row.notes.get("witness_differs")))]
    calls = Counter[str]()
    for id, patch in row.parts[0].items():
        if (family := id.partition(".")[0]) in families:
            calls[family] += patch["calls"]
    return Process(
        **{name: getattr(row, name) for name in ("host", "pid", "start", "rank", "alive", "title")},
        roles=tuple(sorted(roles)),
        present=True,
        families=tuple(sorted(shown.present)),
        patches={id: one for id, one in row.patches.items() if id.split(".")[0] in families}
        if named
        else row.patches,
        states=shown.states,
        problems=tuple(problems),
        node=row.node.label if row.node is not None else "",
        names=tuple(row.on[one]["name"] if one in row.on else one for one in sorted(shown.present)),
        version=row.notes.get("policy_version"),
        ended=ends.of_process(row),
        by_family=dict(calls),
    )


def _ends(rows: Sequence[Row], ended: str) -> Iterator[str]:
    """Yield how the job ended, unless it returned, was interrupted or runs; then the ranks and cores that failed in it."""
    others = (ends.SILENT, ends.LOST, ends.RUNNING, ends.RETURNED, ends.INTERRUPTED, "")
    is_first = {row.key for row in ends.first(rows)}
    for row in rows:
        end = ends.of_process(row)
        if row.key in is_first and end == ended == ends.SILENT:
            yield f"the job ended without a word: {called_by(row)}, as after a signal, a crash or no memory"
        elif end not in (*others, row.stopped * (end != ended)) and (row.key in is_first) == (end == ended):
            yield "the job failed: " * (end == ended) + f"{called_by(row)} ended with {end}"


def called_by(one: Row | Process) -> str:
    """Return what a process is called: its roles, the class of its actor of Ray, its ranks, host and pid, and the node of Ray."""
    what = " ".join(filter(None, ("+".join(one.roles), one.title))) or "process"
    ranks = [f"{name}={value}" for name, value in one.rank.items()]
    node = [f"on {one.node if isinstance(one, Process) else one.node.label}"] if one.node else []
    return " ".join([what, *ranks, f"{one.host}:{one.pid}", *node])


def _missing(expected: Expected) -> Process:
    causes = ["the environment did not reach it, or flashpatch is not installed there"]
    if not expected.alive:
        causes.insert(0, "it ended before it imported the framework")
    problem = f"wrote no row, though process {expected.by} expected one with {', '.join(expected.families)}: "
    problem += ", or ".join(causes)
    who = dict(host=expected.host, pid=expected.pid, roles=expected.roles, rank={}, alive=expected.alive)
    problems = () if expected.is_starting else (problem,)
    return Process(**who, present=False, families=expected.families, patches={}, problems=problems)


def _fault(id: str, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a patch whatever is due."""
    word, detail = written["state"], written.get("detail") or "no reason given"
    if word in ("failed", "displaced"):
        yield f"{id} is {word}: {detail}"
    elif word == "skipped" and not is_absent(word, detail):
        yield f"{id} is skipped: {detail}"


def kinds(roles: Iterable[str], title: str) -> set[str]:
    """Return what a process is: its roles; the class of its actor if they do not say more than that."""
    found = set(roles)
    if title and not found & set(_OWN_ROLES):
        return {title}
    return found or {"process"}


def _name(family: str, rows: Sequence[Row], report: LiveReport) -> TypedName:
    there = Counter(kind for process in report.processes for kind in kinds(process.roles, process.title))
    mine = [process for process in report.processes if process.by_family.get(family)]
    acted = Counter(kind for process in mine for kind in kinds(process.roles, process.title))
    order = sorted(acted, key=lambda kind: (kind not in _OWN_ROLES, kind))
    return TypedName(
        name=report.typed[family],
        family=family,
        acted=", ".join(
            f"{acted[kind]} of {there[kind]} {kind.replace('-', ' ')}{'s' * (there[kind] > 1 and kind.islower())}"
            for kind in order
        )
        or "nowhere",
        calls=sum(process.by_family[family] for process in mine),
        versions=tuple(sorted({process.version for process in mine if process.version is not None})),
        precision=_precision(family, rows),
        problems=len(report.by_family.get(family, ())),
        verdict=report.of(family),
    )


def _precision(family: str, rows: Sequence[Row]) -> str:
    record = registry.families().get(family)
    if record is None or "precision" not in record.options:
        return ""
    on = [row for row in rows if family in row.on]
    noted = {str(row.notes["precision"]) for row in on if row.notes.get("precision")}
    default = record.options["precision"].default
    told = {str(row.on[family]["options"].get("precision", default)) for row in on}
    return ", ".join(sorted(noted or told))
