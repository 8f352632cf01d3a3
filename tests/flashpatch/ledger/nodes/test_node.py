"""Reading a run directory into which other nodes' ledgers were fetched."""

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import run_events

from flashpatch.ledger import files, old_runs, runs
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.node import Node
from flashpatch.verify import live
from flashpatch.verify.job import collect, prometheus
from flashpatch.verify.read_events import Recorded


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def row(host: str, pid: int, **values: Any) -> dict[str, Any]:
    return {**files.row({}), "run": "r", "host": host, "pid": pid, "start": "5", **values}


def place(
    home: Path,
    name: str,
    *rows: dict[str, Any],
    state: str = "alive",
    fetched: float | None = None,
    events: dict[str, str] | None = None,
    **values: Any,
) -> None:
    """Write what was fetched from a node whose processes 2 and 9 ran."""
    now = time.time()
    published = {
        "node": name * 8,
        "host": "far",
        "written": now,
        "alive": [[2, "5"], [9, "5"]],
        "left_out": 0,
        "rows": {f"{one.get('kind')}-{one['host']}-{one['pid']}-5.json": json.dumps(one) for one in rows},
        "events": events or {},
        **values,
    }
    kept = home / "r" / "nodes" / "nodes.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    fetched = now if fetched is None else fetched
    told = {"state": state, "name": name, "address": "10.0.0.1", "fetched": fetched}
    packed = base64.b64encode(keys.packed(published)).decode()
    put(kept, {**before, name: {**told, "published": packed}})


def read(home: Path) -> runs.Run:
    [run] = runs.read(home)
    return run


def test_rows_of_other_nodes_join_those_here(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row("near", 1))
    place(tmp_path, "one", row("far", 2), row("far", 3))
    run = read(tmp_path)
    found, name = [(one.pid, one.alive, one.node and one.node.label) for one in run.rows], "one (oneoneon)"
    assert found == [(1, None, None), (2, True, name), (3, False, name)]
    assert run.problems == []


def test_pages_and_metrics_name_the_node(tmp_path: Path) -> None:
    place(tmp_path, "one", row("far", 2))
    job = Recorded(tmp_path / "r")
    assert [*collect.names(job).values()] == ["process far:2 on one (oneoneon)"]
    assert 'node="one (oneoneon)"' in prometheus.text(job, live.judge(job.run, {}))


def test_a_row_that_is_here_already_is_the_newer_one(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-far-2-5.json", row("far", 2, notes={"updates": 9}))
    place(tmp_path, "one", row("far", 2, notes={"updates": 1}))
    [found] = read(tmp_path).rows
    assert found.notes == {"updates": 9} and found.node is not None and found.alive is True


def test_a_dead_node_has_no_living_process(tmp_path: Path) -> None:
    place(tmp_path, "one", row("far", 2), state="dead")
    [found] = read(tmp_path).rows
    assert found.alive is False and found.node is not None and found.node.label == "one (oneoneon), dead"


@pytest.mark.parametrize("written, fetched", [(40, 0), (61, 61)])
def test_what_nobody_said_lately_is_unknown(tmp_path: Path, written: float, fetched: float) -> None:
    now = time.time()
    place(tmp_path, "one", row("far", 2), written=now - written, fetched=now - fetched)
    [found] = read(tmp_path).rows
    assert found.alive is None


def test_a_process_of_another_container_with_this_host_name_is_not_looked_for_here(tmp_path: Path) -> None:
    pid, start = files.identity()
    here = row(files.host(), pid, start=start)
    place(tmp_path, "one", here, host=files.host())
    [found] = read(tmp_path).rows
    assert found.alive is False, "its node says so, whatever runs here under its number"


def test_expectations_come_once(tmp_path: Path) -> None:
    wanted = dict(kind="expect", host="far", pid=4, start="", roles=[], families=["toy"], by=1)
    put(tmp_path / "r" / "expect-far-4-unknown.json", wanted)
    place(tmp_path, "one", wanted, {**wanted, "pid": 2}, row("far", 2))
    run = read(tmp_path)
    assert len(run.expected) == 2 and [one.pid for one in run.missing] == [4]


def test_events_of_other_nodes_are_read(tmp_path: Path) -> None:
    event = json.dumps({"n": 1, "t": 1.0, "event": "update"}) + "\n"
    put(tmp_path / "r" / "events-near-1-5.jsonl", event)
    place(tmp_path, "one", events={"events-far-2-5.jsonl": event, "events-near-1-5.jsonl": event * 2})
    found, problems = run_events.read(tmp_path / "r")
    assert [(one.host, len(one.events)) for one in found] == [("far", 1), ("near", 1)] and problems == []


@pytest.mark.parametrize("content", ["", '{"one": {}}'])
def test_a_broken_file_about_the_nodes_is_a_problem(tmp_path: Path, content: str) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row("near", 1))
    put(tmp_path / "r" / "nodes" / "nodes.json", content)
    run = read(tmp_path)
    assert len(run.rows) == 1
    assert all("r/nodes/nodes.json: " in problem for problem in run.problems) and len(run.problems) == 1
    assert "another version of FlashPatch wrote it" in run.problems[0] or not content


def test_broken_rows_are_a_problem_and_the_others_are_read(tmp_path: Path) -> None:
    place(tmp_path, "one", row("far", 2), {"kind": "row", "host": "far", "pid": 3})
    run = read(tmp_path)
    assert [found.pid for found in run.rows] == [2] and "one/row-far-3-5.json: no key" in run.problems[0]


def test_an_old_run_goes_with_what_was_fetched_into_it(tmp_path: Path) -> None:
    put(tmp_path / "r" / "row-near-1-5.json", row(files.host(), 1, start="never"))
    put(tmp_path / "r" / ".publisher-0123456789ab", "")
    place(tmp_path, "one", row("far", 2))
    os.utime(tmp_path / "r", (time.time() - 86400 * 3,) * 2)
    assert old_runs.prune(tmp_path, "other", 2.0, 0) == ["r"]
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_a_name_is_called_by_its_address() -> None:
    unnamed = Node("ab" * 28, "", "10.0.0.7", "h", "alive", 0.0, 0.0, ())
    assert unnamed.label == "10.0.0.7 (abababab)"
