"""One row per name that the user typed: where it acted, its calls, versions and precision, and the verdict."""

from dataclasses import replace

import pytest
from live_rows import entry, row

from flashpatch import registry
from flashpatch.ledger.runs import Expected, Run
from flashpatch.verify.live import called_by, judge

PATCHES = registry.patches()
ON = {"fp8": {"name": "int8", "options": {"precision": "int8"}}, "fsdp": {"name": "fsdp", "options": {}}}
STEP = "fp8.vllm.worker_execute_model"
SHARDING = "fsdp.verl.get_sharding_strategy"


def job(*rows, expected=(), required=None):
    run = Run("r", [replace(one, on=ON) for one in rows], list(expected))
    report = judge(run, PATCHES, required)
    return {one.name: one for one in report.names}, report


def worker(pid: int, calls: int = 3, version: int = 2, **more):
    patches = {STEP: entry("live" if calls else "installed", calls)} | {
        id: entry("live", 1) for id in ("fp8.vllm.model_runner_execute_model", "fp8.vllm.process_outputs")
    }
    return row("worker", pid=pid, patches=patches, policy_version=version, **more)


def trainer(pid: int, calls: int = 1):
    found = row("trainer", pid=pid, patches={SHARDING: entry("live", calls), STEP: entry("waiting")})
    return replace(found, title="WorkerDict")


def test_each_name_has_its_row_as_it_was_typed():
    names, _ = job(worker(1), worker(2), worker(3, version=3), trainer(4), trainer(5))
    int8 = names["int8"]
    assert (int8.family, int8.calls, int8.precision) == ("fp8", 15, "int8")
    assert int8.cells()[1] == "3 of 3 workers" and int8.versions == (2, 3)
    fsdp = names["fsdp"]
    assert fsdp.cells()[1:] == ("2 of 2 trainers", "2", "", "", fsdp.verdict)


def test_a_worker_that_carries_nothing_is_counted_among_those_there_are():
    names, report = job(worker(1), row("worker", pid=2))
    assert names["int8"].cells()[1] == "1 of 2 workers" and names["int8"].verdict == "not proven"
    assert any("carries no fp8 patch" in problem for problem in report.problems)


def test_a_problem_counts_against_its_own_name():
    broken = {SHARDING: entry("failed", detail="by x"), STEP: entry("waiting")}
    names, _ = job(worker(1), row("trainer", pid=4, patches=broken))
    assert names["fsdp"].verdict == "not proven" and names["fsdp"].problems == 2, "the worker carries none"
    assert "fsdp.verl" not in " ".join(judge(Run("r", []), PATCHES).problems)
    missing = Expected("far", 9, "", ("worker",), ("fp8",), 1)
    names, _ = job(worker(1), expected=(missing,))
    assert names["int8"].verdict == "not proven" and names["int8"].cells()[1] == "1 of 2 workers"


def test_an_actor_is_called_by_its_class_if_its_role_says_no_more():
    server = replace(row("driver", pid=6, patches={STEP: entry("live", 1)}), title="vLLMHttpServer")
    loop = replace(row(pid=7, patches={STEP: entry("live", 1)}), title="AgentLoopWorker")
    plain = row(pid=8, patches={STEP: entry("live", 1)})
    names, report = job(server, loop, plain)
    assert names["int8"].cells()[1] == "1 of 1 AgentLoopWorker, 1 of 1 process, 1 of 1 vLLMHttpServer"
    assert [called_by(process) for process in report.processes] == [
        "driver vLLMHttpServer far:6",
        "AgentLoopWorker far:7",
        "process far:8",
    ]
    assert all(process.names == ("int8",) for process in report.processes)


def test_precision_as_the_engine_noted_it():
    names, _ = job(worker(1, precision="fp8_per_channel"))
    assert names["int8"].precision == "fp8_per_channel"


def test_a_name_that_no_process_carries_is_left_to_the_problems():
    names, report = job(row("driver", patches={SHARDING: entry("waiting")}), required={"eagle": "eagle"})
    assert names["eagle"].cells()[1] == "nowhere" and names["eagle"].verdict == "not proven"
    assert "no process carries eagle" in report.problems


def test_another_name_of_the_family_than_the_one_that_is_on_is_not_proven():
    assert job(worker(1), required={"fp8": "int8"})[1].problems == ()
    names, report = job(worker(1), required={"fp8": "bf16"})
    assert report.problems == ("no process carries bf16: int8 is on",)
    assert names["bf16"].verdict == "not proven"


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ({"late": {"fp8": "1 engine exists already."}}, "[flashpatch: fp8] 1 engine exists already."),
        ({"policy_state": "broken"}, "[flashpatch: fp8] refuses requests: its last update failed"),
        ({"witness_differs": "[flashpatch: fp8.x] changed"}, "[flashpatch: fp8.x] changed"),
        ({"refusing": "an update is open"}, "[flashpatch: fp8] refuses requests: an update is open"),
    ],
)
def test_a_name_that_does_not_act_on_what_runs_is_not_proven_though_patches_were_called(note, said):
    assert job(worker(1))[0]["int8"].verdict == "proven"
    names, report = job(worker(1, **note))
    assert report.problems == (f"worker far:1: {said}",)
    assert names["int8"].verdict == "not proven" and names["int8"].problems == 1
    assert job(worker(1, late={"fp8": None, "eagle": "x"}, refusing=""), required={"fp8": "int8"})[1].ok


def test_a_policy_that_was_never_updated_is_said_to_be_the_first():
    assert job(worker(1, version=0), worker(2))[0]["int8"].cells()[3] == "0 (as opened), 2"
