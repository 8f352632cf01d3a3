"""Reading a run directory into which other nodes' ledgers were fetched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flashpatch.ledger import files, old_runs, read_events, runs
from flashpatch.ledger.nodes.node import Node


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def row(host: str, pid: int, **values: Any) -> dict[str, Any]:
    return {**files.row({}), "run": "r", "host": host, "pid": pid, "start": "5", **values}


def place(home: Path, name: str, *pids: int, **values: Any) -> Path:
    """Write what was fetched from a node whose processes ``pids`` ran."""
    now = time.time()
    folder = home / "r" / "nodes" / name
    index = {
        "node": name * 8,
        "name": name,
        "address": "10.0.0.1",
        "host": "far",
        "state": "alive",
        "written": now,
        "fetched": now,
        "alive": [[pid, "5"] for pid in pids],
        "problems": [],
        **values,
    }
    put(folder / "node.json", index)
    return folder


def read(home: Path) -> runs.Run:
    [run] = runs.read(home)
    return run


def test_rows_of_other_nodes_join_those_here(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row("near", 1))
    put(place(tmp_path, "one", 2) / "row-far-2-5.json", row("far", 2))
    put(tmp_path / "r" / "nodes" / "one" / "row-far-3-5.json", row("far", 3))
    run = read(tmp_path)
    assert [(found.pid, found.alive, found.node and found.node.label) for found in run.rows] == [
        (1, None, None),
        (2, True, "one (oneoneon)"),
        (3, False, "one (oneoneon)"),
    ]
    assert run.problems == []


def test_a_row_that_is_here_already_is_the_newer_one(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-far-2-5.json", row("far", 2, notes={"updates": 9}))
    put(place(tmp_path, "one", 2) / "row-far-2-5.json", row("far", 2, notes={"updates": 1}))
    [found] = read(tmp_path).rows
    assert found.notes == {"updates": 9} and found.node is not None and found.alive is True


def test_a_dead_node_has_no_living_process(tmp_path: Path) -> None:
    put(place(tmp_path, "one", 2, state="dead") / "row-far-2-5.json", row("far", 2))
    [found] = read(tmp_path).rows
    assert found.alive is False and found.node is not None and found.node.label == "one (oneoneon), dead"


@pytest.mark.parametrize("written, fetched", [(40, 0), (61, 61)])
def test_what_nobody_said_lately_is_unknown(tmp_path: Path, written: float, fetched: float) -> None:
    now = time.time()
    folder = place(tmp_path, "one", 2, written=now - written, fetched=now - fetched)
    put(folder / "row-far-2-5.json", row("far", 2))
    [found] = read(tmp_path).rows
    assert found.alive is None


def test_a_process_of_another_container_with_this_host_name_is_not_looked_for_here(tmp_path: Path) -> None:
    pid, start = files.identity()
    here = row(files.host(), pid, start=start)
    put(place(tmp_path, "one", host=files.host()) / f"row-{files.host()}-{pid}-{start}.json", here)
    [found] = read(tmp_path).rows
    assert found.alive is False, "its node says so, whatever runs here under its number"


def test_expectations_come_once(tmp_path: Path) -> None:
    wanted = {"host": "far", "pid": 4, "start": "", "roles": [], "families": ["toy"], "by": 1}
    put(tmp_path / "r" / "expect-far-4-unknown.json", wanted)
    folder = place(tmp_path, "one", 2)
    put(folder / "expect-far-4-unknown.json", wanted)
    put(folder / "expect-far-2-unknown.json", {**wanted, "pid": 2})
    put(folder / "row-far-2-5.json", row("far", 2))
    run = read(tmp_path)
    assert len(run.expected) == 2 and [one.pid for one in run.missing] == [4]


def test_with_one_node_alone_its_name_says_nothing(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-far-1-5.json", row("far", 1))
    place(tmp_path, "one", here=True)
    assert read(tmp_path).rows[0].node is None
    put(place(tmp_path, "two", 2) / "row-two-2-5.json", row("two", 2))
    assert [found.node and found.node.name for found in read(tmp_path).rows] == ["one", "two"]


def test_events_of_other_nodes_are_read(tmp_path: Path) -> None:
    event = json.dumps({"n": 1, "t": 1.0, "event": "update"}) + "\n"
    put(tmp_path / "r" / "events-near-1-5.jsonl", event)
    folder = place(tmp_path, "one", 2)
    put(folder / "events-far-2-5.jsonl", event)
    put(folder / "events-near-1-5.jsonl", event * 2)
    found, problems = read_events.read(tmp_path / "r")
    assert [(one.host, len(one.events)) for one in found] == [("near", 1), ("far", 1)] and problems == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"problems": [], "node": "x"}', '{"problems": 3}'])
def test_a_broken_file_about_a_node_is_a_problem(tmp_path: Path, content: str) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row("near", 1))
    put(tmp_path / "r" / "nodes" / "one" / "node.json", content)
    run = read(tmp_path)
    assert len(run.rows) == 1 and "r/nodes/one/node.json" in run.problems[0]


def test_an_old_run_goes_with_what_was_fetched_into_it(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row(files.host(), 1, start="never"))
    put(tmp_path / "r" / ".publisher-0123456789ab", "")
    put(place(tmp_path, "one", 2) / "row-far-2-5.json", row("far", 2))
    os.utime(tmp_path / "r", (time.time() - 86400 * 3,) * 2)
    assert old_runs.prune(tmp_path, "other", 2.0, 0) == [], "its node said just now that a process runs"
    place(tmp_path, "one", 2, fetched=time.time() - 86400 * 3)
    assert old_runs.prune(tmp_path, "other", 2.0, 0) == ["r"]
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_a_name_is_called_by_its_address() -> None:
    unnamed = Node("ab" * 28, "", "10.0.0.7", "h", "alive", 0.0, 0.0, ())
    assert unnamed.label == "10.0.0.7 (abababab)"
