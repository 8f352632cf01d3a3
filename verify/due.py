"""Find which evidence is due in each process of a run, and what of it was not observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashpatch import evidence, registry
from flashpatch.conditions import Facts
from flashpatch.evidence import Due
from flashpatch.ledger.runs import Row
from flashpatch.record import Patch
from flashpatch.verify import ends

_ARRIVED = frozenset({"installed", "live", "displaced", "failed", "superseded"})


@dataclass(frozen=True)
class Situation:
    """Hold what happened in one process of a run and what it was told, as `evidence.due` takes them."""

    happened: frozenset[str]
    facts: Facts
    options: Mapping[str, Mapping[str, Any]]


def situations(rows: Sequence[Row], patches: Mapping[str, Patch]) -> list[Situation]:
    """Return the situation of each process.

    Updates concern the whole job, but the engines that were opened after the last one. Steps concern a process, its parent and its
    children, of which one noted some or had a patch called that is called on steps; another replica of the job may be idle."""
    updated = any(row.notes.get("updates") or row.notes.get("drafter_version") for row in rows)
    fresh = opened_since(rows)
    stepped = [row for row in rows if has_stepped(row, patches)]
    theirs = {(row.host, row.pid) for row in stepped}
    parents = {(row.host, row.ppid) for row in stepped}
    anywhere = frozenset(id for row in rows for id in called(row))
    started = children(rows)
    known = registry.families()
    defaults = {
        name: {option: one.default for option, one in known[name].options.items()} if name in known else {}
        for name in carried(rows)
    }
    # A process that wrote nothing of a family got the same as another.
    shared = {family: choice for row in rows for family, choice in row.on.items()}
    told: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    found = []
    for row in rows:
        here = (row.host, row.pid)
        near = here in theirs or here in parents or (row.host, row.ppid) in theirs
        happened = {"install", *["step"] * near, *["update"] * (updated and here not in fresh)}
        mine, child = called(row), frozenset(started.get(here, ()))
        facts = Facts(called=mine, anywhere=anywhere, child=child, uses={id.split(".")[1] for id in mine})
        if (chosen := repr(row.on)) not in told:
            told[chosen] = {
                family: {**values, **(row.on.get(family) or shared.get(family) or {}).get("options", {})}
                for family, values in defaults.items()
            }
        found.append(Situation(frozenset(happened), facts, told[chosen]))
    return found


def carried(rows: Sequence[Row]) -> set[str]:
    """Return the families of which some process wrote a patch."""
    parts = {id(part): part for row in rows for part in row.parts}
    return {id.partition(".")[0] for part in parts.values() for id in part}


def opened_since(rows: Sequence[Row]) -> set[tuple[str, int]]:
    """Return host and pid of the workers whose weights were loaded after the last update of the job, and of what started
    these. A worker notes when it got its policy; one that says nothing is as old as its row."""
    last = max((row.notes.get("policy_since", 0.0) for row in rows if row.notes.get("updates")), default=0.0)
    loaded = [row for row in rows if "worker" in row.roles and not row.notes.get("updates")]
    fresh = [row for row in loaded if row.notes.get("policy_since", row.first_written) > last > 0]
    return {(row.host, pid) for row in fresh for pid in (row.pid, row.ppid)}


def called(row: Row) -> frozenset[str]:
    """Return the ids of the patches that were called in a process."""
    return frozenset(id for id, patch in row.parts[0].items() if patch["calls"])


def owed(
    row: Row,
    carried: Mapping[str, Mapping[str, Any]],
    roles: set[str],
    at: Situation,
    patches: Mapping[str, Patch],
) -> Iterator[tuple[Due, str]]:
    """Yield each thing that is due because of a process, of the patches that are asked about, with a sentence if it was not
    observed there; of several that show the same one has it. For what is due once in the job the sentence says so."""
    known = [patches[id] for id in sorted(carried) if id in patches]
    told: set[frozenset[str]] = set()
    for one in evidence.due(known, roles, at.options, at.happened, at.facts):
        group, problem = frozenset(one.alternatives), ""
        if one.in_job:
            if carried[one.patch.id]["state"] == "installed" and not one.shown_by(at.facts.anywhere):
                problem = f"{one} was called in no process, though {one.reason}"
        elif group not in told and not one.shown_by(at.facts.called):
            problem = _problem(one, row, carried)
            told |= {group} if problem else set()
        yield one, problem


def _problem(one: Due, row: Row, carried: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what is missing; empty if the state says enough, or another framework is at work in the process."""
    written = carried[one.patch.id]
    word, others = written["state"], [carried[id]["state"] for id in one.patch.one_of if id in carried]
    arrived = {id.split(".")[1] for id, patch in row.patches.items() if patch["state"] in _ARRIVED}
    # If another framework's patches have arrived and none of this one's has, the process works with that.
    in_use = one.patch.framework in arrived or not arrived
    if word == "waiting" and not _ARRIVED & set(others) and in_use:
        return f"{one.patch.id} is still waiting for {written['target'] or one.patch.targets[0]}, though {one.reason}"
    if word == "installed" and one.patch.evidence != "install":
        return f"{one} was never called, though {one.reason}"
    return ""


def children(rows: Sequence[Row]) -> dict[tuple[str, int], set[str]]:
    """Return host and pid of a process to the roles of those that it started; another driver is a job of its own."""
    found: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        if "driver" not in row.roles:
            found.setdefault((row.host, row.ppid), set()).update(row.roles)
    return found


def has_stepped(row: Row, patches: Mapping[str, Patch]) -> bool:
    """Whether a process finished a step: it noted some, or had a patch called that is called on steps, twice unless the process
    returned, since the last step may never have ended."""
    least = 1 if row.ended in (None, ends.RETURNED) else 2
    found = (patches[id] for id in called(row) if id in patches and row.parts[0][id]["calls"] >= least)
    steps = any(patch.evidence == "step" and patch.scope != {"driver"} for patch in found)
    return steps or bool(row.notes.get("steps"))
