"""Measure what gathering a job's ledger through Ray costs, and how long it takes to read.

    python benchmarks/nodes.py [--nodes 125] [--processes 8] [--events 200] [--rounds 5]

Needs Ray. A Ray of one node is started, whose store serves all; the nodes' run directories are made up, with rows as
large as real ones and timed events. Printed are what one node's publisher takes for everything, for one changed row per
process and for nothing changed; what the store then holds; and what a reader takes: to copy everything, to copy it again
when every row has changed, when nothing has, to read and judge the copy, and the whole command ``flashpatch-verify
--live --ray``. Medians of the rounds, wall time; the last line has the reader's processor
time too, which other work on the machine does not change. Exits 1 where reading takes 2 s or more: copying all rows anew, reading
and judging.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import quick

from flashpatch import registry
from flashpatch.ledger import files, runs
from flashpatch.ledger.nodes import fetch
from flashpatch.ledger.nodes.publisher import Publisher
from flashpatch.ledger.nodes.ray_store import Store
from flashpatch.verify import live

AIM_SECONDS = 2.0
RUN = "made-up"
FAMILIES = ("fp8", "fsdp", "eagle")


def main() -> None:
    """Read the options and measure; exit 1 where reading misses the aim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--processes", type=int, default=8, help="per node")
    parser.add_argument("--events", type=int, default=200, help="per process")
    parser.add_argument("--rounds", type=int, default=5)
    options = quick.parse(parser, nodes=3, processes=2, events=20, rounds=1)
    import ray

    context = ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
    address = context.address_info["gcs_address"]
    try:
        with tempfile.TemporaryDirectory(prefix="flashpatch-nodes-") as scratch:
            sys.exit(_measure(options, Path(scratch), address))
    finally:
        ray.shutdown()


def _measure(options: argparse.Namespace, scratch: Path, address: str) -> int:
    store = Store(address)
    folders = [scratch / f"node-{number}" / RUN for number in range(options.nodes)]
    rng = random.Random(0)
    for number, folder in enumerate(folders):
        _write_rows(folder, number, options.processes, rng)
        _write_events(folder, number, options.processes, options.events)
    publishers = [
        Publisher(store, RUN, str(folder), f"{number:056x}") for number, folder in enumerate(folders)
    ]
    row = next(folders[0].glob("row-*")).stat().st_size
    total = options.nodes * options.processes
    print(
        f"{total} processes on {options.nodes} nodes, rows of {row / 1e3:.1f} KB, {options.events} events each"
    )

    first = median(_seconds(publisher.publish) for publisher in publishers)
    copy = scratch / "ledger" / RUN
    fresh = _seconds(lambda: fetch.fetch(store, RUN, copy))
    changed, copied, same, idle, judged, spent = [], [], [], [], [], []
    for _ in range(options.rounds):
        for number, folder in enumerate(folders):
            _write_rows(folder, number, options.processes, rng)
        changed += [_seconds(publisher.publish) for publisher in publishers]
        idle += [_seconds(publisher.publish) for publisher in publishers]
        began = time.process_time()
        copied.append(_seconds(lambda: fetch.fetch(store, RUN, copy)))
        judged.append(_seconds(lambda: _judge(copy, total)))
        spent.append(time.process_time() - began)
        same.append(_seconds(lambda: fetch.fetch(store, RUN, copy)))
    keys = store.keys("v1/")
    held = sum(map(len, store.get(keys).values()))
    print(
        f"a node's publisher: everything {first * 1e3:.1f} ms, all rows changed {median(changed) * 1e3:.1f} ms, "
        f"nothing changed {median(idle) * 1e3:.2f} ms"
    )
    print(
        f"the store holds {held / 1e6:.2f} MB under {len(keys)} keys, {held / total / 1e3:.2f} KB per process"
    )
    print(
        f"a reader: everything copied in {fresh:.2f} s; all rows copied again in {median(copied):.2f} s, nothing changed "
        f"{median(same):.2f} s; the copy read and judged in {median(judged):.2f} s"
    )
    arguments = ["--live", str(scratch / "other"), "--all", "--ray", address]
    (scratch / "other").mkdir()
    code = "import sys; from flashpatch.verify.cli import main; sys.exit(main())"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = _seconds(lambda: _command([sys.executable, "-c", code, *arguments], total))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"flashpatch-verify --live --ray, imports and a first copy with events included: {whole:.2f} s "
        f"({cpu:.2f} s of processor time)"
    )
    reading = median(copied) + median(judged)
    print(
        f"rows read and judged in {reading:.2f} s ({median(spent):.2f} s of processor time), "
        f"of a budget of {AIM_SECONDS:g} s"
    )
    return int(reading >= AIM_SECONDS)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _judge(folder: Path, total: int) -> None:
    run = runs.read_run(folder)
    assert run is not None and len(run.rows) == total and not run.problems
    assert len(live.judge(run, registry.patches()).processes) == total


def _command(command: list[str], total: int) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.count(f"{files.host()}:") == total, done.stderr


def _write_rows(folder: Path, node: int, processes: int, rng: random.Random) -> None:
    for pid in range(processes):
        patches = {
            id: {
                "state": "live",
                "detail": "",
                "calls": rng.randrange(10**6),
                "target": patch.targets[0],
                "tested": True,
            }
            for id, patch in registry.patches().items()
            if patch.family in FAMILIES
        }
        row = files.row({"patches": patches, "versions": {"vllm": "0.31.0", "verl": "0.9.1"}}, ("worker",))
        pid += 1000 * (node + 1)
        row |= {
            "run": RUN,
            "pid": pid,
            "start": "5",
            "notes": {"updates": rng.randrange(100), "nonce": rng.random()},
        }
        files.write(folder / files.file_name("row", files.host(), pid, "5"), row)


def _write_events(folder: Path, node: int, processes: int, events: int) -> None:
    for pid in range(1000 * (node + 1), 1000 * (node + 1) + processes):
        with (folder / f"events-{files.host()}-{pid}-5.jsonl").open("w") as file:
            for number in range(1, events + 1):
                event = {
                    "n": number,
                    "t": 1.75e9 + number,
                    "event": "update",
                    "outcome": "committed",
                    "version": number,
                }
                file.write(json.dumps({**event, "seconds": number / 7, "rss_bytes": number * 8191}) + "\n")


if __name__ == "__main__":
    main()
