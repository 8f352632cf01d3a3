"""Evidence with alternatives and conditions, in hand-made runs; and what the records of all families say about it."""

import importlib
import inspect

import pytest
from live_rows import entry, patch, row

from flashpatch import conditions, registry
from flashpatch.evidence import explain, may_be_due
from flashpatch.ledger.runs import Run
from flashpatch.record import Family, Option, Patch
from flashpatch.verify.live import judge

PLAIN = patch("fam.toy.step", "step", "engine-core", one_of=("fam.toy.queue",))
QUEUE = patch("fam.toy.queue", "step", "engine-core", one_of=("fam.toy.step",))
INT8 = patch("fam.toy.int8", "optional", "worker", when="precision=int8")
CLEAN = patch("fam.toy.clean", "update", "worker", when="called=fam.toy.begin")
BEGIN = patch("fam.toy.begin", "optional", "worker")
SENT = patch("fam.toy.sent", "optional", "trainer", when="anywhere=fam.toy.begin")
SPAWN = patch("fam.toy.spawn", "optional", "driver", when="child=engine-core")
PATCHES = {p.id: p for p in (PLAIN, QUEUE, INT8, CLEAN, BEGIN, SENT, SPAWN)}


def problems(*rows) -> list[str]:
    return list(judge(Run("r", list(rows)), PATCHES).problems)


def idle(*of: Patch) -> dict:
    return {p.id: entry("installed") for p in of}


def test_of_alternatives_one_is_enough_and_none_is_named_once():
    both = idle(PLAIN, QUEUE)
    assert problems(row("engine-core", patches=both, steps=1)) == [
        "engine-core far:10: fam.toy.queue or fam.toy.step was never called, though there were steps"
    ]
    for taken in (PLAIN, QUEUE):
        assert problems(row("engine-core", patches={**both, taken.id: entry("live", 3)}, steps=1)) == []
    waits = {PLAIN.id: entry("live", 3), QUEUE.id: entry("waiting")}
    assert problems(row("engine-core", patches=waits, steps=1)) == []


def on(row_, **options):
    return type(row_)(**{**vars(row_), "on": {"fam": {"name": "fam", "options": options}}})


def test_what_an_option_makes_due():
    worker = row("worker", patches=idle(INT8))
    assert problems(worker) == problems(on(worker, precision="fp8")) == []
    assert problems(on(worker, precision="int8")) == [
        "worker far:10: fam.toy.int8 was never called, though precision is int8"
    ]
    told = on(row("driver", pid=11, patches=idle(BEGIN)), precision="int8")
    assert len(problems(worker, told)) == 1, "the worker got what the driver has"


def test_what_another_call_in_the_process_makes_due():
    begun = {BEGIN.id: entry("live", 1), CLEAN.id: entry("installed")}
    assert problems(row("worker", patches=begun)) == [], "the update is under way"
    assert problems(row("worker", patches=idle(BEGIN, CLEAN), updates=1)) == []
    [problem] = problems(row("worker", patches=begun, updates=1))
    assert problem.endswith("clean was never called, though there were updates and fam.toy.begin was called")


def test_no_update_is_due_in_an_engine_that_was_opened_after_the_last():
    updates = patch("fam.toy.load", "update", "worker"), patch("fam.toy.forward", "update", "engine-core")
    known = {one.id: one for one in updates}

    def found(since: float) -> list[str]:
        both = {id: entry("live", 3) for id in known}
        first = row("worker", "engine-core", pid=3, patches=both, updates=3, policy_since=300.0)
        core = row("engine-core", pid=8, patches=idle(updates[1]))
        new = row("worker", pid=4, ppid=8, patches=idle(updates[0]), policy_version=0, policy_since=since)
        return list(judge(Run("r", [first, core, new]), known).problems)

    assert len(found(200.0)) == 2, "it was there, and got none"
    assert found(400.0) == []


def test_what_is_due_once_in_the_job_or_through_a_child():
    begun = row("worker", patches={BEGIN.id: entry("live", 1)})
    sides = [row("trainer", pid=pid, patches=idle(SENT)) for pid in (20, 21)]
    assert problems(*sides) == []
    assert problems(begun, *sides) == [
        "fam.toy.sent was called in no process, though fam.toy.begin was called in this job"
    ]
    assert problems(begun, sides[0], row("trainer", pid=21, patches={SENT.id: entry("live", 1)})) == []
    driver = row("driver", patches=idle(SPAWN))
    assert problems(driver, row("engine-core", pid=11, ppid=9, patches=idle(BEGIN))) == []
    assert len(problems(driver, row("engine-core", pid=11, ppid=10, patches=idle(BEGIN)))) == 1


def test_records_are_checked():
    with pytest.raises(ValueError, match="is not of the form"):
        patch("fam.toy.x", "optional", "worker", when="precision")
    with pytest.raises(ValueError, match="faults alone"):
        patch("fam.toy.x", "fault", "worker", when="precision=int8")
    with pytest.raises(ValueError, match="fam has no option precision"):
        Family("fam", "", (INT8,))
    assert Family("fam", "", (INT8,), options={"precision": Option("fp8", "", choices=("fp8", "int8"))})


RECORDS = registry.patches()


def test_conditions_and_alternatives_name_patches_that_there_are_and_stand_for_each_other():
    for record in RECORDS.values():
        terms = [one for one in conditions.parse(record.when) if one.key in ("called", "anywhere")]
        named = {id for term in terms for id in term.values}
        assert named | set(record.one_of) <= set(RECORDS), record.id
        assert record.id not in named, f"{record.id} waits for itself"
        launched = "launch_servers" in record.when and record.evidence == "optional"
        assert not launched, f"{record.id}: a server that was launched may not be asked yet"
        for other in record.one_of:
            assert record.id in RECORDS[other].one_of and RECORDS[other].framework == record.framework


def test_most_patches_are_due_in_some_job():
    never = [record.id for record in RECORDS.values() if not may_be_due(record)]
    assert len(RECORDS) - len(never) >= 110, never


def test_it_is_said_in_words():
    said = explain(RECORDS["fp8.vllm.engine_core_step"])
    assert said == "once a step was taken; fp8.vllm.step_with_batch_queue shows it too"
    said = explain(RECORDS["fp8.verl_vllm.sender_cleanup"])
    assert said == "once weights were updated, if fp8.verl_vllm.async_send_weights was called"
    assert explain(RECORDS["fp8.vllm.init_executor"]) == "if it started a process of role worker"


UNWRAPPED = [one for one in RECORDS.values() if one.wrapper is None and one.evidence in ("update", "step")]


@pytest.mark.parametrize("patch", UNWRAPPED, ids=lambda patch: patch.id)
def test_a_due_patch_without_a_wrapper_counts_its_calls_itself(patch: Patch) -> None:
    """Else ``--live`` would call every job in which it is due unproven."""
    assert patch.apply is not None
    assert "record_call(" in inspect.getsource(importlib.import_module(patch.apply.__module__))
