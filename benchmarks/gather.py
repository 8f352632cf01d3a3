"""Compare two ways to gather a job's ledger: through Ray's key-value store, as FlashPatch does, and through an actor.

    python benchmarks/gather.py [--processes 1000] [--events 200] [--rounds 5] [--window 20]

Needs Ray. Three raylets on this machine; each node has a run directory of its own with made-up rows and events of a third of the processes, and one
worker that passes them on. The peer is the simplest way: `Collector`, a named, detached actor beside the driver that writes
what the nodes send into the driver's directory; a node looks at its directory as often as FlashPatch does. In both ways a node's
worker reads the same files, so that processes without Ray (engine cores) are covered. Printed for each way: seconds from new rows until
the driver's directory has all of them (median, least to most); processor seconds per minute of everything that gathers (workers,
driver, collector, raylets, GCS) over those of a window without gathering, with all rows new every 10 s; memory of processes of its own; and what
the driver has of a node that is killed. For the store also the seconds until a reader (`--live --ray`) can have the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
import zlib
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import nodes
import quick

if find_spec("ray") is None:
    print("Ray is not installed")
    raise SystemExit

import ray
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from flashpatch.ledger import files
from flashpatch.ledger.nodes import agent, fetch, keys, node
from flashpatch.ledger.nodes.publisher import Publisher, _alive
from flashpatch.ledger.nodes.ray_store import Store

NAMES = ("head", "one", "two")
WAYS = ("store", "actor")


class Collector:
    """The peer's actor: write what nodes send into the driver's directory."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / node.FOLDER

    def pid(self) -> int:
        return os.getpid()

    def take(self, place: str, rows: bytes, alive: list[Any], events: dict[str, tuple[int, bytes]]) -> None:
        home = self._folder / place
        if rows:
            files.write_bytes(home / "rows.z", rows)
        files.write_bytes(home / "alive.json", json.dumps(alive).encode())
        for name, (offset, content) in events.items():
            with (home / name).open("r+b" if (home / name).exists() else "wb") as file:
                file.seek(offset)
                file.write(zlib.decompress(content))
                file.truncate()


class Sender:
    """The peer's part on a node: send what changed."""

    def __init__(self, folder: Path, place: str) -> None:
        self._folder, self._place = folder, place
        self._seen: dict[str, tuple[int, int]] = {}
        self._texts: dict[str, str] = {}
        self._collector = ray.get_actor("flashpatch-ledger", namespace="flashpatch")

    def publish(self) -> None:
        changed, events, found = False, {}, {}
        for entry in os.scandir(self._folder):
            if not keys.FILE.fullmatch(entry.name):  # one that is being written
                continue
            status = entry.stat()
            found[entry.name] = status
            before = self._seen.get(entry.name)
            version = status.st_size, status.st_mtime_ns
            if before == version:
                continue
            self._seen[entry.name] = version
            if entry.name.startswith("events-"):
                offset = before[0] if before and before[0] <= status.st_size else 0
                with open(entry.path, "rb") as file:
                    file.seek(offset)
                    events[entry.name] = offset, zlib.compress(file.read(), 1)
            else:
                self._texts[entry.name] = Path(entry.path).read_text()
                changed = True
        rows = keys.packed(self._texts) if changed else b""
        ray.get(self._collector.take.remote(self._place, rows, _alive(found), events))


class Node:
    """The worker of a node that passes its run directory on."""

    def __init__(self, folder: str, number: int, processes: int, events: int) -> None:
        self._folder, self._number, self._processes = Path(folder), number, processes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._writing = 0.0
        self._random = random.Random(number)
        self.write()
        nodes._write_events(self._folder, number, processes, events)

    def write(self) -> None:
        """Give all rows another state."""
        began = time.process_time()
        nodes._write_rows(self._folder, self._number, self._processes, self._random)
        self._writing += time.process_time() - began

    def start(self, way: str, address: str) -> None:
        place = f"{self._number}" * 12
        node_id = ray.get_runtime_context().get_node_id()
        one: Any
        if way == "store":
            one = Publisher(Store(address), nodes.RUN, str(self._folder), node_id)
        else:
            one = Sender(self._folder, place)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(one,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, one: Any) -> None:
        while not self._stop.is_set():
            one.publish()
            self._stop.wait(agent._PERIOD)

    def spent(self) -> float:
        return time.process_time() - self._writing

    def pid(self) -> int:
        return os.getpid()


def newest(folder: Path) -> dict[str, bytes]:
    """Return the packed rows of each place that the driver's directory holds."""
    found = {}
    for path in sorted((folder / node.FOLDER).glob("*/rows*.z"), key=lambda path: path.stat().st_mtime):
        found[path.parent.name] = path.read_bytes()
    return found


def held(packed: dict[str, bytes]) -> dict[str, str]:
    return {name: text for data in packed.values() for name, text in keys.unpacked(data).items()}


class Bench:
    """The cluster, its workers and the driver's directory of one way."""

    def __init__(self, options: argparse.Namespace, scratch: Path, cluster: Cluster, way: str) -> None:
        self.way, self.address = way, cluster.address
        self.copy = scratch / way / "driver" / nodes.RUN
        self.there = [scratch / way / name / nodes.RUN for name in NAMES]
        share = -(-options.processes // len(NAMES))
        actor = ray.remote(Node)
        self.workers = [
            actor.options(num_cpus=0, resources={name: 0.1}).remote(
                str(folder), number, share, options.events
            )
            for number, (name, folder) in enumerate(zip(NAMES, self.there, strict=True))
        ]
        self.pids = ray.get([worker.pid.remote() for worker in self.workers])
        self.collector, self.store = None, Store(cluster.address)
        self._stop = threading.Event()
        self.servers = [
            info.process.pid
            for one in cluster.list_all_nodes()
            for kind, infos in one.all_processes.items()
            if kind in ("raylet", "gcs_server")
            for info in infos
        ]

    def start(self) -> None:
        if self.way == "actor":
            options = {"name": "flashpatch-ledger", "namespace": "flashpatch", "lifetime": "detached"}
            self.collector = (
                ray.remote(Collector)
                .options(num_cpus=0, resources={"head": 0.1}, **options)
                .remote(str(self.copy))
            )
            self.pids.append(ray.get(self.collector.pid.remote()))
        ray.get([worker.start.remote(self.way, self.address) for worker in self.workers])
        if self.way == "store":
            self._thread = threading.Thread(target=self._copying, daemon=True)
            self._thread.start()

    def _copying(self) -> None:
        """Copy as the driver's thread does."""
        while not self._stop.wait(agent._COPY):
            fetch.fetch(self.store, nodes.RUN, self.copy)

    def fresh(self) -> float:
        """Write all rows anew; return the seconds until the driver's directory has them."""
        ray.get([worker.write.remote() for worker in self.workers])
        began, wanted = time.perf_counter(), self.wanted()
        before: dict[str, bytes] = {}
        while True:
            now = newest(self.copy)
            if now != before and wanted.items() <= held(now).items():
                return time.perf_counter() - began
            before = now
            time.sleep(0.05)

    def wanted(self) -> dict[str, str]:
        return {path.name: path.read_text() for folder in self.there for path in folder.glob("row-*")}

    def seen_by_a_reader(self, folder: Path) -> float:
        ray.get([worker.write.remote() for worker in self.workers])
        began, wanted = time.perf_counter(), self.wanted()
        while True:
            fetch.fetch(self.store, nodes.RUN, folder)
            if wanted.items() <= held(newest(folder)).items():
                return time.perf_counter() - began
            time.sleep(0.2)

    def spent(self, window: float) -> float:
        """Return processor seconds per minute, all rows new every 10 s."""
        before, end = self._cpu(), time.monotonic() + window
        while time.monotonic() < end:
            ray.get([worker.write.remote() for worker in self.workers])
            time.sleep(min(10.0, window))
        return (self._cpu() - before) * 60 / window

    def _cpu(self) -> float:
        total = sum(ray.get([worker.spent.remote() for worker in self.workers])) + time.process_time()
        collector = self.pids[len(self.workers) :]
        for pid in (*self.servers, *collector):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def memory(self) -> float:
        """Return megabytes of the collector."""
        found = 0.0
        for pid in self.pids[len(self.workers) :]:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
        return found

    def end(self) -> None:
        self._stop.set()
        if self.way == "store":
            self._thread.join()
        if self.collector is not None:
            ray.kill(self.collector)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--events", type=int, default=200, help="per process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--window", type=float, default=20.0, help="seconds over which processor time is counted"
    )
    options = quick.parse(parser, processes=9, events=20, rounds=1, window=2.0)
    times = {}
    for way in WAYS:
        cluster = Cluster()
        for name in NAMES:
            cluster.add_node(
                num_cpus=1, resources={name: 1}, object_store_memory=80_000_000, include_dashboard=False
            )
            Path(get_ray_address_file(None)).unlink(missing_ok=True)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            with tempfile.TemporaryDirectory(prefix="flashpatch-gather-") as scratch:
                times[way] = _measure(options, Path(scratch), cluster, way)
        finally:
            ray.shutdown()
            cluster.shutdown()
    print(
        f"rows reach the driver through an actor in {times['actor'] / times['store']:.2f} times the seconds of the store"
    )


def _measure(options: argparse.Namespace, scratch: Path, cluster: Cluster, way: str) -> float:
    bench = Bench(options, scratch, cluster, way)
    quiet = bench.spent(options.window)
    bench.start()
    bench.fresh()
    found = []
    for _ in range(options.rounds):
        time.sleep(random.uniform(0, agent._COPY if options.rounds > 1 else 0.1))
        found.append(bench.fresh())
    found.sort()
    spent = bench.spent(options.window)
    print(
        f"{way}: {options.processes} processes on 3 nodes; rows in the driver's directory after {median(found):.1f} s "
        f"({found[0]:.1f} to {found[-1]:.1f}); {spent - quiet:.1f} processor seconds a minute (of {spent:.1f}); "
        f"{bench.memory():.0f} MB in a process of its own"
    )
    if way == "store":
        print(
            f"store: a reader has them after {bench.seen_by_a_reader(scratch / 'reader' / nodes.RUN):.1f} s"
        )
    bench.fresh()
    dead = cluster.list_all_nodes()[2]
    for pid in (bench.pids[2], dead.all_processes["raylet"][0].process.pid):
        os.kill(pid, signal.SIGKILL)
    time.sleep(agent._COPY + 1 if options.rounds > 1 else 1.0)
    lost = {path.name for path in bench.there[2].glob("row-*")}
    kept = lost & held(newest(bench.copy)).keys()
    print(f"{way}: of the killed node's {len(lost)} rows the driver has {len(kept)}", flush=True)
    bench.end()
    return median(found)


if __name__ == "__main__":
    main()
