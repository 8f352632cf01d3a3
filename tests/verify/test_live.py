"""The verdict on hand-made runs, one rule at a time."""

from collections.abc import Mapping

import pytest
from live_rows import entry, patch, row

from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.verify.live import judge

LOAD = patch("fam.toy.load", "update", "worker")
STEP = patch("fam.toy.step", "step", "engine-core")
DOOR = patch("fam.toy.door", "install", "driver")
FAULT = patch("fam.toy.fault", "fault", "worker")
OPTIONAL = patch("fam.toy.optional", "optional", "worker")
OTHER = patch("fam.rival.load", "update", "worker")
PATCHES = {p.id: p for p in (LOAD, STEP, DOOR, FAULT, OPTIONAL, OTHER)}


def problems(
    *rows: Row, expected: tuple[Expected, ...] = (), required: Mapping[str, str] | None = None
) -> list[str]:
    report = judge(Run("r", list(rows), list(expected)), PATCHES, required)
    assert not (report.ok and report.problems)
    return list(report.problems)


def worker(state: str, patch=LOAD, updates: int = 0, **more) -> Row:
    return row("worker", patches={patch.id: entry(state, **more)}, updates=updates)


FINE = {
    "the framework is absent": [worker("skipped", detail="toy is not installed")],
    "superseded": [worker("superseded", updates=4)],
    "waiting out of scope": [row("driver", patches={LOAD.id: entry("waiting")}, updates=1)],
    "waiting before it is due": [worker("waiting")],
    "waiting in a process of no role": [row(patches={DOOR.id: entry("waiting")})],
    "waiting for a framework that the process does not use": [
        row("worker", patches={LOAD.id: entry("live", 1), OTHER.id: entry("waiting")}, updates=1)
    ],
}


@pytest.mark.parametrize("rows", FINE.values(), ids=FINE)
def test_what_is_fine(rows):
    assert problems(*rows) == []


def test_update_evidence_is_due_once_any_process_of_the_run_updated():
    assert problems(worker("installed")) == []
    driver = row("driver", pid=11, updates=2)
    assert problems(worker("installed"), driver)[0] == (
        "worker far:10: fam.toy.load was never called, though there were updates"
    )


@pytest.mark.parametrize(("pid", "ppid"), [(11, 10), (5, 1)])
def test_step_evidence_is_due_once_parent_or_child_stepped(pid, ppid):
    near = row("engine-core", pid=pid, ppid=ppid, patches={STEP.id: entry("live", 4)})
    idle = row("engine-core", pid=10, ppid=5, patches={STEP.id: entry("installed")})
    [problem] = problems(near, idle)
    assert problem.startswith("engine-core far:10: fam.toy.step was never called")


def test_another_replica_may_be_idle():
    busy = row("engine-core", pid=11, ppid=5, patches={STEP.id: entry("live", 4)})
    idle = row("engine-core", pid=10, ppid=5, patches={STEP.id: entry("installed")})
    elsewhere = row("engine-core", pid=5, host="there", patches={STEP.id: entry("live", 4)})
    assert problems(busy, idle, elsewhere) == []


def test_install_evidence_is_due_at_boot():
    [problem] = problems(row("driver", patches={DOOR.id: entry("waiting")}))
    assert "fam.toy.door is still waiting for toy.core:f" in problem


@pytest.mark.parametrize("spare", [FAULT, OPTIONAL], ids=lambda patch: patch.evidence)
def test_what_is_for_faults_or_another_path_is_healthy_while_never_called(spare):
    for state in ("installed", "waiting"):
        assert problems(row("worker", patches={spare.id: entry(state)}, updates=3, steps=3)) == []


def expects(pid: int, *roles: str, host: str = "far", start: str = "") -> Expected:
    return Expected(host, pid, start, roles, ("fam",), 1)


def test_a_missing_process_is_named():
    report = judge(Run("r", [row(pid=1)], [expects(12, "worker")]), PATCHES)
    [problem] = report.problems
    assert problem.startswith("worker far:12: wrote no row, though process 1 expected one with fam")
    missing = report.processes[-1]
    assert (missing.present, missing.alive, missing.how) == (False, None, "lost")


def test_a_process_without_a_family_that_is_expected_carried_by_peers_or_required_is_named():
    assert problems(row(pid=12), expected=(expects(12, "worker"),)) == [
        "worker far:12: carries no fam patch, though one is expected"
    ]
    peer = row("worker", patches={LOAD.id: entry("live", 3)}, updates=1)
    assert problems(peer, row("worker", pid=12)) == [
        "worker far:12: carries no fam patch, though its role needs one; switched on in it: nothing"
    ]
    assert problems(row("worker"), required={"fam": "typed"}) == [
        "worker far:10: carries no typed patch, though its role needs one; switched on in it: nothing",
        "no process carries typed",
    ]


def test_an_expected_role_counts_where_the_process_never_learned_it():
    waiting = row(pid=12, patches={LOAD.id: entry("waiting")}, updates=1)
    [problem] = problems(waiting, expected=(expects(12, "worker"),))
    assert problem.startswith("worker far:12: fam.toy.load is still waiting")


def test_families_not_asked_for_are_left_out():
    foreign = {"else.toy.x": entry("failed"), LOAD.id: entry("live", 1)}
    assert problems(row("worker", patches=foreign), required={"fam": "typed"}) == []
    assert len(problems(row("worker", patches=foreign))) == 1


def test_errors_and_unreadable_files_are_problems():
    run = Run("r", [row("worker", error="lost it")], [], ["r/row-x.json: broken"])
    assert judge(run, PATCHES).problems == ("worker far:10: lost it", "r/row-x.json: broken")
