"""What a broken patch leaves in the ledger, made from every record: ``--live`` names the patch; a whole job gives no alarm.

A job of a family has two processes of each role, in which every patch for that role was called, and options as by default.
Its mutants take one patch whose evidence is due there, and in one process: its calls are gone, its state is another, or it waits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from live_rows import entry, row

from flashpatch import evidence, registry
from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.record import Patch
from flashpatch.verify import due
from flashpatch.verify.live import judge

PATCHES = registry.patches()
ROLES = ("driver", "trainer", "engine-core", "worker")

#: What a mutant leaves: the state that is written, and its detail.
LEFT = {
    "never called": entry("installed"),
    "failed": entry("failed", detail="ZeroDivisionError"),
    "displaced": entry("displaced", 3, "by tool.f"),
    "skipped": entry("skipped", detail="its contract does not hold"),
}


def job(family: str, framework: str) -> list[Row]:
    """Return the rows of a job in which everything was called."""
    mine = [one for one in PATCHES.values() if (one.family, one.framework) == (family, framework)]
    parents = {"driver": 1, "trainer": 10, "engine-core": 10, "worker": 12}
    rows = []
    for place, role in enumerate(ROLES):
        for copy in range(2):
            patches = {
                one.id: entry("live", 3) if not one.scope or role in one.scope else entry("installed")
                for one in mine
            }
            pid = 10 + place + 10 * copy
            rows.append(row(role, pid=pid, ppid=parents[role], patches=patches, updates=2, steps=4))
    return rows


def owed(rows: list[Row]) -> Iterator[tuple[int, evidence.Due]]:
    """Yield what is due in each process, with the number of its row."""
    for number, (one, at) in enumerate(zip(rows, due.situations(rows, PATCHES), strict=True)):
        known = [PATCHES[id] for id in one.patches]
        for what in evidence.due(known, one.roles, at.options, at.happened, at.facts):
            yield number, what


def without(rows: list[Row], number: int, ids: tuple[str, ...], left: Any, everywhere: bool) -> list[Row]:
    """Return the rows with these patches as ``left`` in one process, or in all of them."""
    return [
        replace(one, patches={**one.patches, **dict.fromkeys(set(ids) & set(one.patches), left)})
        if everywhere or place == number
        else one
        for place, one in enumerate(rows)
    ]


GROUPS = sorted({(one.family, one.framework) for one in PATCHES.values()})


@pytest.mark.parametrize(("family", "framework"), GROUPS)
def test_a_whole_job_gives_no_alarm(family: str, framework: str) -> None:
    assert judge(Run("r", job(family, framework), []), PATCHES).problems == ()


def mutants() -> Iterator[tuple[str, Patch, list[Row]]]:
    """Yield every mutant: what it leaves, the patch, the rows of its job."""
    for family, framework in GROUPS:
        rows = job(family, framework)
        for number, what in owed(rows):
            for name, left in LEFT.items():
                if name == "never called" and what.patch.evidence == "install":
                    continue  # it is evidence that it stands there
                yield name, what.patch, without(rows, number, what.alternatives, left, what.in_job)


def test_every_mutant_is_named() -> None:
    made, unnoticed = 0, []
    for name, patch, rows in mutants():
        made += 1
        if not any(patch.id in problem for problem in judge(Run("r", rows, []), PATCHES).problems):
            unnoticed.append(f"{patch.id} {name}")
    assert not unnoticed
    assert made > 500


def test_a_process_that_carries_nothing_is_named() -> None:
    for family, framework in GROUPS:
        rows = job(family, framework)
        for number, gone in enumerate(rows):
            expected = Expected(gone.host, gone.pid, gone.start, gone.roles, (family,), gone.ppid)
            left = [one for place, one in enumerate(rows) if place != number]
            assert judge(Run("r", left, [expected]), PATCHES).problems, (family, framework, gone.roles)
