"""An engine or a fleet at rest on two versions of the policy is a problem, named with its ranks and versions."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from live_rows import row

from flashpatch import ledger
from flashpatch.ledger import files
from flashpatch.ledger.runs import Row, Run
from flashpatch.verify import cli
from flashpatch.verify.live import judge


def worker(rank: int, version: int, ppid: int = 7, state: str = "ready", **more: Any) -> Row:
    notes = {"policy_version": version, "policy_state": state, "updates": version, **more}
    return replace(row("worker", pid=10 * ppid + rank, ppid=ppid, **notes), rank={"rank": rank})


def problems(*rows: Row) -> tuple[str, ...]:
    return judge(Run("r", list(rows), []), {}).problems


def test_ranks_on_two_versions_and_engines_sent_different_steps_are_named() -> None:
    assert problems(worker(0, 3), worker(1, 3)) == ()
    [problem] = problems(worker(0, 3), worker(1, 2))
    assert problem == (
        "the ranks of one engine hold several policy versions: 2 in rank 1 (far:71); 3 in rank 0 (far:70). "
        "Send a complete update to all of them"
    )
    [problem] = problems(worker(0, 3, sync_step=3), worker(0, 2, ppid=8, sync_step=2))
    assert problem.startswith(
        "engines of one job hold the policies of several steps: 2 in rank 0 (far:80); 3 in rank 0 (far:70)"
    )


def test_ranks_of_one_engine_are_found_on_any_host() -> None:
    one, other = replace(worker(0, 3), engine="x"), replace(worker(1, 2, ppid=8), host="there", engine="x")
    [problem] = problems(one, other)
    assert problem.startswith("the ranks of one engine hold several policy versions:")
    assert problems(one, replace(other, host="far", engine="y")) == ()


def test_an_engine_that_takes_steps_and_was_sent_none_is_behind() -> None:
    sent = worker(0, 3, sync_step=3, policy_since=300.0)
    for notes in ({"policy_version": 0, "policy_since": 100.0}, {}):
        missed = replace(worker(0, 0, ppid=8), notes={"steps": 5, **notes})
        [problem] = problems(sent, missed)
        assert problem.startswith(
            "engines of one job hold the policies of several steps: none in rank 0 (far:80); 3 in rank 0 (far:70)"
        )
        assert problems(sent, replace(missed, notes={**notes})) == (), "it answers nothing"
    opened_since = worker(0, 0, ppid=8, steps=5, policy_since=400.0)
    assert problems(sent, opened_since) == ()


def test_data_parallel_engines_of_one_front_end_are_one() -> None:
    cores = [replace(row("engine-core", pid=pid, ppid=1)) for pid in (7, 8)]
    others = [replace(worker(rank, 2, ppid=8), rank={"rank": rank, "dp": 1}) for rank in (0, 1)]
    ranks = [worker(0, 3), worker(1, 3), *others]
    [problem] = problems(*cores, *ranks)
    assert "2 in rank 0, dp 1 (far:80), rank 1, dp 1 (far:81); 3 in rank 0 (far:70)" in problem
    alike = [replace(one, rank={"rank": one.rank["rank"]}) for one in ranks]
    assert problems(*cores, *alike) == (), "two engines in one process, each updated by itself"


@pytest.mark.parametrize(
    "rows",
    [
        (worker(0, 3), worker(1, 2, state="open")),  # not at rest
        (worker(0, 3), worker(0, 2)),  # two engines of one process, updated by themselves
        (worker(0, 9, sync_step=4), worker(0, 1, ppid=8, sync_step=4)),  # one was started again
        (worker(0, 9), worker(0, 1, ppid=8)),  # engines that no trainer's step compares
        (worker(0, 3), worker(1, 3, drafter_version=1)),
    ],
)
def test_what_is_no_split_gives_no_alarm(rows: tuple[Row, ...]) -> None:
    assert problems(*rows) == ()


def test_a_replica_that_was_killed_is_no_alarm() -> None:
    here = replace(
        worker(0, 3, sync_step=3), host=files.host(), pid=os.getpid(), start=files.process_start(os.getpid())
    )
    killed = replace(worker(0, 2, ppid=8, sync_step=2), host=files.host(), pid=1 << 30)
    assert problems(here, killed) == ()
    assert problems(here, replace(killed, host="far"))


def test_live_looks_twice_at_a_fleet_that_runs(tmp_path, monkeypatch, capsys):
    """Between two commits a healthy engine holds two versions; what is still so at the second look is a problem."""
    ranks = [json.loads(json.dumps(_written(rank, version))) for rank, version in ((0, 3), (1, 2))]
    home = tmp_path / "ledger"
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(home))

    def write(which: list[dict[str, Any]]) -> None:
        for one in which:
            files.write(home / "r" / files.file_name("row", one["host"], one["pid"], one["start"]), one)

    write(ranks)
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    assert cli.main(["--live", str(home)]) == cli.NOT_LIVE
    assert "several policy versions: 2 in rank 1" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: write([_written(1, 3)]))
    cli.main(["--live", str(home)])
    assert "several policy versions" not in " ".join(capsys.readouterr().out.split())
    assert ledger.read(home)


def _written(rank: int, version: int) -> dict[str, Any]:
    pid = os.getpid() if rank == 0 else os.getppid()
    own = {"host": files.host(), "pid": pid, "start": files.process_start(pid), "kind": "row"}
    return {**vars(worker(rank, version)), **own}
