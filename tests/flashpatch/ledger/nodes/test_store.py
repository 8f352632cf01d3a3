"""What is published in a real Ray's store and what comes out of it again."""

from __future__ import annotations

import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from flashpatch.ledger import events, files, read_events, runs
from flashpatch.ledger.nodes import fetch, keys, old_keys, publisher
from flashpatch.ledger.nodes.publisher import Publisher
from flashpatch.ledger.nodes.ray_store import Store

pytestmark = pytest.mark.verl


@pytest.fixture
def store(nodes) -> Iterator[Store]:
    """The store of a cluster, with nothing of ours in it."""
    found = Store(nodes.address)
    found.delete("v1/", prefix=True)
    yield found
    found.delete("v1/", prefix=True)


class Here:
    """A run directory of one process, this one, and what was fetched from it."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.run = uuid.uuid4().hex
        self.folder = folder / "there" / self.run
        self.copy = folder / "here" / self.run
        self.store = store
        self.node = next(iter(store.nodes()))
        pid, start = files.identity()
        self.events = self.folder / f"events-{files.host()}-{pid}-{start}.jsonl"
        self.publisher = Publisher(store, self.run, str(self.folder), self.node)
        self.note(0)

    def note(self, number: int) -> None:
        row = {**files.row({}, notes={"updates": number}), "run": self.run}
        pid, start = files.identity()
        files.write(self.folder / files.file_name("row", files.host(), pid, start), row)

    def log(self, count: int, first: int = 0, **facts: Any) -> None:
        with self.events.open("a") as file:
            for n in range(first, first + count):
                file.write(json.dumps({"n": n + 1, "t": 1.0 + n, "event": "update", **facts}) + "\n")

    def turn(self) -> tuple[runs.Row, list[read_events.ProcessEvents]]:
        """Publish, fetch and read."""
        self.publisher.publish()
        assert fetch.fetch(self.store, self.run, self.copy) == 1
        run = runs.read_run(self.copy)
        assert run is not None and run.problems == []
        found, problems = read_events.read(self.copy)
        assert problems == []
        return run.rows[0], found

    def copied(self) -> bytes:
        [copy] = self.copy.glob(f"nodes/*/{self.events.name}")
        return copy.read_bytes()


@pytest.fixture
def here(tmp_path: Path, store: Store) -> Here:
    return Here(tmp_path, store)


def test_a_row_comes_through_and_so_does_its_next_state(here: Here) -> None:
    row, found = here.turn()
    assert (row.pid, row.notes, row.alive, row.fetched) == (os.getpid(), {"updates": 0}, True, True)
    assert row.node is not None and row.node.id == here.node and row.node.state == "alive" and found == []
    here.note(7)
    assert here.turn()[0].notes == {"updates": 7}


def test_of_a_growing_file_only_the_last_chunk_is_written_again(here: Here, monkeypatch) -> None:
    here.log(3000)
    here.turn()
    assert here.copied() == here.events.read_bytes()
    written: list[str] = []
    put = here.store.put
    monkeypatch.setattr(here.store, "put", lambda key, value: written.append(key) or put(key, value))
    here.log(10, first=3000)
    _, [found] = here.turn()
    assert here.copied() == here.events.read_bytes() and len(found.events) == 3010
    assert [key.rpartition("/")[2] for key in written if "/events/" in key] == [
        str(here.events.stat().st_size // keys.CHUNK)
    ]
    written.clear()
    here.turn()
    assert written == [], "nothing changed"


def test_a_file_that_was_shortened_replaces_the_one_before(here: Here) -> None:
    here.log(3000)
    here.turn()
    events._shorten(str(here.events), 20_000)
    _, [found] = here.turn()
    assert here.copied() == here.events.read_bytes() and found.dropped + len(found.events) == 3000
    generations = {key.split("/")[-2] for key in here.store.keys("v1/events/")}
    assert generations == {str(here.events.stat().st_ino)}


def test_of_a_large_file_the_newest_events_are_kept_and_the_others_counted(here: Here) -> None:
    here.log(20_000, outcome="committed", text="x" * 40)
    assert here.events.stat().st_size > (keys.CHUNKS + 2) * keys.CHUNK
    for more in (0, 900):
        here.log(more, first=20_000, outcome="committed", text="x" * 40)
        _, [found] = here.turn()
        assert found.dropped + len(found.events) == 20_000 + more and found.unreadable == 0
        assert found.dropped_kinds == {"update/committed": found.dropped}
        assert found.events[-1]["n"] == 20_000 + more and found.events[0]["n"] == found.dropped + 1
        assert len(here.store.keys("v1/events/")) == keys.CHUNKS


def test_what_was_lost_with_the_head_is_published_again(here: Here, store: Store, monkeypatch) -> None:
    here.log(10)
    here.turn()
    store.delete("v1/", prefix=True)
    monkeypatch.setattr(publisher, "HEARTBEAT", 0.0)
    here.publisher.publish()
    row, [found] = here.turn()
    assert row.pid == os.getpid() and len(found.events) == 10
    assert fetch.run_ids(store) == [here.run]


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
    here.publisher.publish()
    rows = keys.unpacked(store_value(here.store, "v1/rows/"))
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
def test_old_runs_leave_the_store(store: Store, age: float, days: float, most: int, gone: list[str]) -> None:
    for number, run in enumerate("abc"):
        store.put(keys.run(run), keys.packed({"written": time.time() - age + number}))
        for key in (
            keys.index(run, "p"),
            keys.rows(run, "p"),
            keys.chunk(run, "p", "events-h-1-2.jsonl", 3, 0),
        ):
            store.put(key, b"")
    store.put(keys.run("odd"), b"of another format")
    assert sorted(old_keys.prune(store, "present", days, most)) == gone
    left = {key.split("/")[2] for key in store.keys("v1/")}
    assert left == {*"abc", "odd"} - set(gone)


def spoiled(change: Callable[[dict[str, Any], dict[str, str]], object]) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        index_key, rows_key = here.store.keys("v1/index/")[0], here.store.keys("v1/rows/")[0]
        index = keys.unpacked(store_value(here.store, "v1/index/"))
        rows = keys.unpacked(store_value(here.store, "v1/rows/"))
        change(index, rows)
        packed = keys.packed(rows)
        here.store.put(rows_key, packed)
        here.store.put(index_key, keys.packed({**index, "rows": zlib.crc32(packed)}))

    return spoil


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (spoiled(lambda index, rows: rows.update({"row-../../../../x-1-2.json": "{}"})), "no key"),
        (spoiled(lambda index, rows: rows.update({"nodes.json": "{}", ".publisher-0": ""})), ""),
        (spoiled(lambda index, rows: index["events"].update({"../../events-h-1-2.jsonl": {}})), ""),
        (spoiled(lambda index, rows: index.update(format=9)), "format 9"),
        (spoiled(lambda index, rows: index.pop("node")), "'node'"),
        (
            spoiled(
                lambda index, rows: index["events"].update(
                    {"events-h-1-2.jsonl": {"first": 0, "size": 1 << 40, "generation": 1, "gone": {}}}
                )
            ),
            "chunks",
        ),
        (
            spoiled(
                lambda index, rows: index["events"].update(
                    {"events-h-1-2.jsonl": {"first": 0, "size": 5, "generation": 1, "gone": {}}}
                )
            ),
            "changed while",
        ),
        (lambda here: here.store.put(here.store.keys("v1/index/")[0], b"rubbish"), "cannot be read"),
        (
            lambda here: here.store.put(
                here.store.keys("v1/rows/")[0], zlib.compress(b" " * (3 * keys.MOST_BYTES))
            ),
            "more than",
        ),
    ],
)
def test_what_is_in_the_store_is_not_trusted(here: Here, monkeypatch, spoil, problem: str) -> None:
    monkeypatch.setattr(fetch, "_PAUSES", (0.0,))
    here.publisher.publish()
    spoil(here)
    fetch.fetch(here.store, here.run, here.copy)
    run = runs.read_run(here.copy)
    problems = run.problems if run is not None else []
    assert problem in " ".join(problems) if problem else problems == []
    allowed = {here.copy / "nodes" / "nodes.json"}
    written = {
        path for path in here.copy.parents[1].rglob("*") if path.is_file() and here.folder not in path.parents
    }
    assert allowed <= written
    assert {path.parent for path in written - allowed} <= {here.copy / "nodes" / here.publisher.place}
    assert all(path.name.startswith("rows-") for path in written - allowed)
