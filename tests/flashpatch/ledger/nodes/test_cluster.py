"""A job on three raylets without a shared directory: who is seen from where, also when a node has died."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
import pytest
from machine import until
from ray_nodes import Nodes

pytestmark = pytest.mark.verl

BIN = Path(sys.executable).parent


def command(nodes: Nodes, *arguments: object, ledger: str = "reader") -> subprocess.CompletedProcess[str]:
    """Run a command of ours with a ledger directory of its own."""
    env = nodes.environment(FLASHPATCH_LEDGER=str(nodes.ledger(ledger)))
    return machine.run([BIN / str(arguments[0]), *map(str, arguments[1:])], 60, env=env, cwd=nodes.folder)


def live(nodes: Nodes, run: str, ledger: str = "reader", ray: bool = True):
    """Return the exit status of ``--live`` and the processes that it names, by pid."""
    where = ("--ray", nodes.address) if ray else ()
    done = command(nodes, "flashpatch-verify", "--live", *where, "--run", run, "--json", ledger=ledger)
    if done.returncode == 2 or not done.stdout:
        return done.returncode, {}
    return done.returncode, {one["pid"]: one for one in json.loads(done.stdout)["processes"]}


def calls_of(process: dict[str, Any]) -> int:
    return sum(patch["calls"] for patch in process["patches"].values())


def name_of(process: dict[str, Any]) -> str:
    return process["node"].partition(" ")[0]


@pytest.mark.full
def test_the_rows_of_all_nodes_are_gathered_and_those_of_a_dead_one_are_kept(nodes: Nodes) -> None:
    job = nodes.start()
    actors = {name: job.actor(name) for name in ("head", "one", "two")}
    assert [actor["seen"] for actor in actors.values()] == [["patched", 2]] * 3
    run, driver = actors["one"]["run"], actors["one"]["driver"]
    where = {actor["pid"]: name for name, actor in actors.items()}
    where |= {actors["one"]["child"]: "one", driver: "head"}

    def all_called() -> dict[int, dict[str, Any]] | None:
        code, found = live(nodes, run)
        called = {pid for pid, one in found.items() if calls_of(one)}
        return found if code == 0 and set(found) == set(where) and called == {*where} - {driver} else None

    found = until(all_called)
    assert {pid: name_of(one) for pid, one in found.items()} == where
    assert all(one["alive"] for one in found.values())
    assert {calls_of(one) for one in found.values()} == {0, 1}, "the driver calls nothing"
    assert found[actors["one"]["child"]]["roles"] == ["engine-core"]
    nodes.kill("one", actors["one"]["pid"], actors["one"]["child"])
    on_one = {pid for pid, name in where.items() if name == "one"}

    def is_known_dead() -> dict[int, dict[str, Any]] | None:
        code, found = live(nodes, run)
        assert code == 0 and set(found) == set(where), "a node's death is no fault of a patch"
        return found if all(found[pid]["node"].endswith(", dead") for pid in on_one) else None

    found = until(is_known_dead)
    assert {pid for pid, one in found.items() if not one["alive"]} == on_one
    assert {calls_of(found[pid]) for pid in on_one} == {1}
    table = command(nodes, "flashpatch-verify", "--live", "--ray", nodes.address, "--run", run)
    assert table.returncode == 0 and "dead" in table.stdout and "two (" in table.stdout, table.stdout
    report = json.loads(command(nodes, "flashpatch", "report", run, "--ray", nodes.address, "--json").stdout)
    where = [update["process"].partition(" on ")[2].partition(" ")[0] for update in report["updates"]]
    assert sorted(where) == ["head", "one", "two"]
    metrics = command(nodes, "flashpatch", "metrics", run, "--ray", nodes.address).stdout
    assert 'node="one (' in metrics and "flashpatch_weight_updates_total" in metrics
    # another process of the node publishes when the one that did is gone
    os.kill(actors["two"]["pid"], signal.SIGKILL)
    later = job.actor("two-again")

    def took_over() -> dict[int, dict[str, Any]] | None:
        _, found = live(nodes, run)
        return found if later["pid"] in found and not found[actors["two"]["pid"]]["alive"] else None

    found = until(took_over)
    assert name_of(found[later["pid"]]) == "two" and found[later["pid"]]["alive"]
    assert job.end() == 0
    # without the cluster, from what was copied: by the command, and by the driver into its own ledger
    for ledger in ("reader", "driver/cache/flashpatch"):
        code, kept = live(nodes, run, ledger=ledger, ray=False)
        assert code == 0 and set(kept) == {*where, later["pid"]}, ledger
        assert {pid: name_of(kept[pid]) for pid in where} == where, ledger


def test_switched_off_nothing_is_published(nodes: Nodes) -> None:
    job = nodes.start("quiet", FLASHPATCH_LEDGER_RAY="0")
    told = job.actor("two")
    assert told["seen"] == ["patched", 2]
    assert list(nodes.ledger("two").joinpath(told["run"]).glob("row-*")), "its node has the row"
    assert job.end() == 0
    _, found = live(nodes, told["run"], ledger="quiet/cache/flashpatch", ray=False)
    assert set(found) == {told["driver"]}, "no other directory is seen from here"
    done = command(nodes, "flashpatch-verify", "--live", "--ray", nodes.address, "--run", told["run"])
    assert done.returncode == 1 and "is published on the Ray cluster" in done.stderr


def test_a_cluster_that_is_not_there_is_an_error(nodes: Nodes) -> None:
    done = command(nodes, "flashpatch-verify", "--live", "--ray", "127.0.0.1:1")
    assert done.returncode == 2 and "cannot be read from Ray" in done.stderr, done.stderr
    done = command(nodes, "flashpatch", "report", "--ray", "127.0.0.1:1")
    assert done.returncode == 1 and "cannot be read from Ray" in done.stderr, done.stderr
    done = command(nodes, "flashpatch-verify", "--ray")
    assert done.returncode == 2 and "--ray goes with --live" in done.stderr
