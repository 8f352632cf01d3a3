"""What ``--live`` says of ledgers made from the records: clean runs of every kind give no alarm, a broken patch is named.

A run is a job's ledger: the rows of its processes. Two clean ones differ in what is on (one family or several), in the framework, in
the processes (roles of a process of its own or joined, one or two of each), in their order, in whether only what is due was called
or everything, and in whether the job was resumed, so that processes of an earlier try lie beside it.

A mutant is a job of one family and framework with two processes of each role, in which everything was called but one patch whose
evidence is due there: in one process its calls are gone, its state is another, or it waits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from live_rows import entry, row

from flashpatch import evidence, patches, registry
from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.record import Patch
from flashpatch.verify import due
from flashpatch.verify.live import judge

PATCHES = registry.patches()
ROLES = ("driver", "trainer", "engine-core", "worker")

#: Roles of the processes of a job, by kind of job: an engine in one process, one of several, a job of verl on one node.
SHAPES = {
    "one process": (("driver", "engine-core", "worker"),),
    "core beside": (("driver",), ("engine-core", "worker")),
    "ranks beside": (("driver",), ("engine-core",), ("worker",), ("worker",)),
    "trainer": (("driver",), ("trainer",), ("trainer",), ("engine-core",), ("worker",)),
    "hybrid": (("driver",), ("trainer", "worker"), ("trainer", "worker"), ("engine-core",)),
}

#: What a mutant leaves: the state that is written, and its detail.
LEFT = {
    "never called": entry("installed"),
    "failed": entry("failed", detail="ZeroDivisionError"),
    "displaced": entry("displaced", 3, "by tool.f"),
    "skipped": entry("skipped", detail="its contract does not hold"),
}


def everything(
    families: tuple[str, ...], frameworks: set[str], shape: tuple[tuple[str, ...], ...]
) -> list[Row]:
    """Return the rows of a job in which each patch was called in each process whose role it has."""
    mine = [one for one in PATCHES.values() if one.family in families and one.framework in frameworks]
    rows = []
    for place, roles in enumerate(shape):
        states = {
            one.id: entry("live", 3) if not one.scope or one.scope & set(roles) else entry("installed")
            for one in mine
        }
        rows.append(row(*roles, pid=10 + place, ppid=10 if place else 1, patches=states, updates=2, steps=4))
    return rows


def owed(rows: list[Row]) -> Iterator[tuple[int, evidence.Due]]:
    """Yield what is due in each process, with the number of its row."""
    for number, (one, at) in enumerate(zip(rows, due.situations(rows, PATCHES), strict=True)):
        known = [PATCHES[id] for id in one.patches]
        for what in evidence.due(known, one.roles, at.options, at.happened, at.facts):
            yield number, what


def problems(rows: list[Row]) -> tuple[str, ...]:
    return judge(Run("r", rows, []), PATCHES).problems


def least(rows: list[Row]) -> list[Row]:
    """Return the rows with the calls of patches that are due by themselves alone, and of those that this makes due."""
    called: set[tuple[int, str]] = set()
    while True:
        found = [
            replace(one, patches={
                id: state if (place, id) in called or state["state"] != "live" else entry("installed")
                for id, state in one.patches.items()
            })
            for place, one in enumerate(rows)
        ]  # fmt: skip
        more = {
            (where, id)
            for place, what in owed(found)
            for where, one in enumerate(rows)
            if what.in_job or where == place
            for id in what.alternatives
            if one.patches[id]["state"] == "live"
        }
        if more <= called:
            return found
        called |= more


def resumed(rows: list[Row]) -> list[Row]:
    """Return the rows beside those of a try before, which was ended by force."""
    earlier = [replace(one, pid=one.pid + 100, ppid=one.ppid + 100, start="5") for one in rows]
    return [*earlier, *rows]


def runs() -> Iterator[tuple[str, list[Row]]]:
    """Yield every clean run, with what tells it from the others."""
    several = (combinations(patches.ORDER, size) for size in (1, 2, 3, 6))
    for families in chain.from_iterable(several):
        for shape_name, shape in SHAPES.items():
            for engine in ("vllm", "sglang"):
                with_verl = any("trainer" in roles for roles in shape)
                frameworks = {engine} | ({"verl", f"verl_{engine}", "torch", "ray"} if with_verl else set())
                rows = everything(families, frameworks, shape)
                if not any(one.patches for one in rows):
                    continue
                for calls, found in (("all", rows), ("least", least(rows))):
                    name = f"{','.join(families)} {shape_name} {engine} {calls}"
                    yield name, found
                    yield f"{name} reversed", found[::-1]
                    yield f"{name} resumed", resumed(found)


def test_no_clean_run_gives_an_alarm() -> None:
    made = dict(runs())
    assert not {name: found[0] for name, rows in made.items() if (found := problems(rows))}
    assert len({repr(rows) for rows in made.values()}) > 1000


def whole_jobs() -> Iterator[tuple[str, list[Row]]]:
    """Yield a family and the rows of a job of it, for each framework that it patches."""
    for family, framework in sorted({(one.family, one.framework) for one in PATCHES.values()}):
        rows = everything((family,), {framework}, tuple((role,) for role in ROLES + ROLES))
        assert not problems(rows)
        yield family, rows


def without(rows: list[Row], number: int, ids: tuple[str, ...], left: Any, everywhere: bool) -> list[Row]:
    """Return the rows with these patches as ``left`` in one process, or in all of them."""
    return [
        replace(one, patches={**one.patches, **dict.fromkeys(set(ids) & set(one.patches), left)})
        if everywhere or place == number
        else one
        for place, one in enumerate(rows)
    ]


def mutants() -> Iterator[tuple[str, Patch, list[Row]]]:
    """Yield every mutant: what it leaves, the patch, the rows of its job."""
    for _, rows in whole_jobs():
        for number, what in owed(rows):
            for name, left in LEFT.items():
                if name == "never called" and what.patch.evidence == "install":
                    continue  # it is evidence that it stands there
                yield name, what.patch, without(rows, number, what.alternatives, left, what.in_job)


def test_every_mutant_is_named() -> None:
    made, unnoticed = 0, []
    for name, patch, rows in mutants():
        made += 1
        if not any(patch.id in problem for problem in problems(rows)):
            unnoticed.append(f"{patch.id} {name}")
    assert not unnoticed
    assert made > 500


def test_a_process_that_carries_nothing_is_named() -> None:
    for family, rows in whole_jobs():
        for number, gone in enumerate(rows):
            expected = Expected(gone.host, gone.pid, gone.start, gone.roles, (family,), gone.ppid)
            left = [one for place, one in enumerate(rows) if place != number]
            assert judge(Run("r", left, [expected]), PATCHES).problems, (family, gone.roles)
