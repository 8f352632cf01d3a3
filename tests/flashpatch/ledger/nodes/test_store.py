"""What is published in a real Ray's store and what comes out of it again."""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_events

from flashpatch.ledger import events, files, runs
from flashpatch.ledger.nodes import keys, node, published
from flashpatch.ledger.nodes.ray_store import Store

pytestmark = pytest.mark.verl


@pytest.fixture
def store(nodes) -> Iterator[Store]:
    """The store of a cluster, with nothing of ours in it."""
    found = Store(nodes.address)
    found.delete("v3/", prefix=True)
    yield found
    found.delete("v3/", prefix=True)


class Here:
    """A run directory of one process, this one, and what was fetched from it."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.run = uuid.uuid4().hex
        self.folder = folder / "there" / self.run
        self.copy = folder / "here" / self.run
        self.store = store
        self.node = next(iter(store.nodes()))
        self.note(0)

    def note(self, number: int) -> None:
        row = {**files.row({}, notes={"updates": number}), "run": self.run}
        pid, start = files.identity()
        files.write(self.folder / files.file_name("row", files.host(), pid, start), row)

    def log(self, count: int, first: int = 0, **facts: Any) -> None:
        """Write events as this process does, in its own run."""
        for n in range(first, first + count):
            events.log.append("update", {"number": n, **facts})

    def publish(self) -> None:
        published.publish(self.store, self.run, str(self.folder), self.node)

    def turn(self) -> tuple[runs.Row, list[run_events.ProcessEvents]]:
        """Publish, fetch and read."""
        self.publish()
        assert node.fetch(self.store, self.run, self.copy) == 1
        run = runs.read_run(self.copy)
        assert run is not None and run.problems == []
        found, problems = run_events.read(self.copy)
        assert problems == []
        return run.rows[0], found


@pytest.fixture
def here(tmp_path: Path, store: Store, monkeypatch) -> Here:
    here = Here(tmp_path, store)
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(here.folder.parent))
    monkeypatch.setenv("FLASHPATCH_RUN", here.run)
    monkeypatch.setattr(events, "log", events.EventLog())
    return here


def test_a_row_comes_through_and_so_does_its_next_state(here: Here) -> None:
    row, found = here.turn()
    assert (row.pid, row.notes, row.alive, row.fetched) == (os.getpid(), {"updates": 0}, True, True)
    assert row.node is not None and row.node.id == here.node and row.node.state == "alive" and found == []
    here.note(7)
    assert here.turn()[0].notes == {"updates": 7}


@pytest.mark.parametrize("largest", ["1000000", "4000000"])
def test_the_newest_events_are_kept_and_the_others_counted(here: Here, monkeypatch, largest: str) -> None:
    """The end of one file, and of a file and the one before it."""
    monkeypatch.setenv("FLASHPATCH_EVENT_BYTES", largest)
    for first, more in ((0, 7000), (7000, 900)):
        here.log(more, first=first, outcome="committed", text="x" * 40)
        _, [found] = here.turn()
        total = first + more
        assert found.dropped + len(found.events) == total and found.unreadable == 0
        assert found.dropped_kinds == {"update/committed": found.dropped}
        assert found.events[-1]["n"] == total and found.events[0]["n"] == found.dropped + 1
        assert 190 << 10 < sum(len(json.dumps(event)) for event in found.events) < 300 << 10


def test_what_was_lost_with_the_head_is_published_again(here: Here, store: Store) -> None:
    here.log(10)
    here.turn()
    store.delete("v3/", prefix=True)
    row, [found] = here.turn()
    assert row.pid == os.getpid() and len(found.events) == 10
    assert published.run_ids(store) == [here.run]


def test_a_process_that_ended_is_not_alive(here: Here) -> None:
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = files.process_start(child.pid) or ""
    row = {**files.row({}), "pid": child.pid, "start": start, "run": here.run}
    files.write(here.folder / files.file_name("row", files.host(), child.pid, start), row)

    def alive() -> dict[int, bool | None]:
        here.turn()
        run = runs.read_run(here.copy)
        assert run is not None
        return {row.pid: row.alive for row in run.rows}

    assert alive() == {os.getpid(): True, child.pid: True}
    child.communicate(b"\n")
    assert alive() == {os.getpid(): True, child.pid: False}


def test_rows_of_other_hosts_in_a_shared_directory_are_left_to_them(here: Here) -> None:
    row = {**files.row({}), "host": "far", "run": here.run}
    files.write(here.folder / "row-far-1-5.json", row)
    files.write(here.folder / "expect-far-2-.json", {"kind": "expect", "host": "far", "pid": 2})
    here.publish()
    rows = keys.unpacked(store_value(here.store, "v3/places/"))["rows"]
    assert {name.split("-")[0] for name in rows} == {"row", "expect"} and "row-far-1-5.json" not in rows


def store_value(store: Store, prefix: str) -> bytes:
    [key] = store.keys(prefix)
    return store.get([key])[key]


@pytest.mark.parametrize(
    "age, days, most, gone",
    [
        (700, 0, 2, ["a", "b"]),
        (700, 0, 3, ["a"]),
        (500, 0, 2, []),  # published to within the last ten minutes
        (2 * 86400, 1, 0, ["a", "b", "c"]),
        (86000, 1, 0, []),
    ],
)
def test_old_runs_leave_the_store(store, monkeypatch, age, days, most, gone):
    monkeypatch.setenv("FLASHPATCH_KEEP_DAYS", str(days))
    monkeypatch.setenv("FLASHPATCH_KEEP_RUNS", str(most))
    for number, run in enumerate("abc"):
        store.put(keys.of_run(run), keys.packed({"written": time.time() - age + number}))
        store.put(keys.of_place(run, "p"), b"")
    store.put(keys.of_run("odd"), b"of another format")
    assert sorted(published.prune(store, "present")) == gone
    left = {key.split("/")[2] for key in store.keys("v3/")}
    assert left == {*"abc", "odd"} - set(gone)


def spoiled(change: Callable[[dict[str, Any]], object]) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        found = keys.unpacked(store_value(here.store, "v3/places/"))
        change(found)
        here.store.put(here.store.keys("v3/places/")[0], keys.packed(found))

    return spoil


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (spoiled(lambda found: found["rows"].update({"row-../../../../x-1-2.json": "{}"})), "no key"),
        (spoiled(lambda found: found.pop("node")), "'node'"),
        (spoiled(lambda found: found.update(left_out=3)), "3 rows of"),
        (lambda here: here.store.put(here.store.keys("v3/places/")[0], b"rubbish"), "cannot be read"),
    ],
)
def test_what_is_in_the_store_is_not_trusted(here: Here, spoil, problem: str) -> None:
    here.log(1)
    here.publish()
    spoil(here)
    node.fetch(here.store, here.run, here.copy)
    run = runs.read_run(here.copy)
    assert run is not None and problem in " ".join(run.problems)
    run_events.read(here.copy)
    outside = here.copy.parents[1].rglob("*")
    written = {path for path in outside if path.is_file() and here.folder not in path.parents}
    assert written == {here.copy / "nodes" / "nodes.json"}
