"""What a sync to separate rollouts costs by FlashPatch's checkpoint engine gloo, beside the simplest way through Ray.

    python benchmarks/transfer.py [--models 50 350] [--rollouts 1 2] [--bucket 128] [--rounds 5] [--store 2000]

Needs verl and Ray; no engine. A trainer and its rollouts are Ray actors on this machine: the trainer sends random bf16 weights (so
many millions), a rollout copies them into a model of its own. Both ways go through Ray's object store. The peer, `Bare`, checks
nothing: `ray.put` per bucket, one actor with the references, two buckets under way, tensors that are views of the store. Both ways in
the same run, one after the other in each round. Printed per model and number of rollouts, for each way: seconds of a sync (median,
least to most), the peak of the memory of all processes over what they held before, the object store included (each shared page once),
and what of it is still held after the sync. Then how many seconds after a rollout is killed in the middle of a sync the trainer has
an error. --store is the size of the object store, --directory where its memory is mapped: Ray takes /tmp if /dev/shm has no room."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import quick

if find_spec("verl") is None:
    print("verl is not installed")
    raise SystemExit

import ray
import torch

WIDE = 1024
PATIENCE = 30.0  # seconds of both ways' time-outs
WAYS = ("gloo", "bare")


class Mailbox:
    """Hand references to buckets from one sender to receivers; at most two are under way."""

    def __init__(self, receivers: int) -> None:
        self._receivers, self._taken = receivers, [0] * receivers
        self._buckets: dict[int, Any] = {}
        self._failed = ""
        self._changed = asyncio.Condition()

    async def put(self, number: int, bucket: list[Any]) -> None:
        """Take a bucket once every receiver has asked for the one before the last."""
        async with self._changed:
            self._buckets[number] = bucket
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._failed or min(self._taken) >= number)
            self._buckets.pop(number - 1, None)
        if self._failed:
            raise RuntimeError(self._failed)

    async def get(self, receiver: int, number: int) -> list[Any]:
        async with self._changed:
            self._taken[receiver] = number
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._failed or number in self._buckets)
        if self._failed:
            raise RuntimeError(self._failed)
        return self._buckets[number]

    async def fail(self, text: str) -> None:
        async with self._changed:
            self._failed = text
            self._changed.notify_all()


class Bare:
    """The peer: send and receive through Ray's object store."""

    def __init__(self, mailbox: Any, bucket: int, receiver: int = -1) -> None:
        self._box, self._bucket, self._receiver = mailbox, bucket, receiver

    async def send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        number, size, held, waiting = 0, 0, [], None
        for name, tensor in [*weights, ("", torch.empty(0))]:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if held and (not name or size + data.numel() > self._bucket):
                reference = ray.put(held)
                if waiting is not None:
                    await asyncio.wait_for(waiting, PATIENCE)
                waiting = asyncio.wrap_future(self._box.put.remote(number, [reference]).future())
                number, size, held = number + 1, 0, []
            held.append((name, tensor.dtype, tuple(tensor.shape), data.numpy()))
            size += data.numel()
        if waiting is not None:
            await asyncio.wait_for(waiting, PATIENCE)
        await asyncio.wait_for(self._box.put.remote(number, []), PATIENCE)

    async def receive(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for number in range(1 << 30):
            found = await asyncio.wait_for(self._box.get.remote(self._receiver, number), PATIENCE)
            if not found:
                return
            for name, dtype, shape, data in await found[0]:
                yield name, torch.from_numpy(data).view(dtype).view(shape)


def made(millions: int) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    for number in range(max(1, round(millions * 1e6 / WIDE**2))):
        yield f"layers.{number}.weight", torch.randn(WIDE, WIDE, generator=random).bfloat16()
        yield f"layers.{number}.norm", torch.randn(WIDE, generator=random).bfloat16()


class Side:
    """One process: the trainer (rank 0) or a rollout."""

    def __init__(self, rank: int, bucket: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.bucket, self.model = rank, bucket, {}
        from flashpatch.patches.cpu.checkpoint_engine import ObjectStoreEngine

        self.engine = ObjectStoreEngine(bucket, is_master=rank == 0, timeout_seconds=PATIENCE)

    def load(self, millions: int) -> None:
        self.model = {
            name: torch.zeros_like(tensor) if self.rank else tensor for name, tensor in made(millions)
        }

    def pid(self) -> int:
        return os.getpid()

    def prepare(self) -> Any:
        return self.engine.prepare()

    def topology(self, *given: Any) -> Any:
        return self.engine.build_topology(*given)

    def join(self, rank: int, join: Any, peers: Any) -> None:
        self.engine.init_process_group(rank, join, peers)

    def finalize(self) -> None:
        self.engine.finalize()

    def sync(self, way: str, mailbox: Any, dies: bool = False) -> tuple[float, float]:
        """Take part in a sync; return its seconds and the sum of the weights. With ``dies`` it is killed in the middle."""
        began = time.perf_counter()
        if self.rank == 0:
            asyncio.run(_send(self, way, mailbox))
        else:
            asyncio.run(_take(self, way, mailbox, dies))
        seconds = time.perf_counter() - began
        return seconds, sum(tensor.double().sum().item() for tensor in self.model.values())


# not methods: a class with such is an asynchronous actor to Ray
async def _send(side: Side, way: str, mailbox: Any) -> None:
    if way == "gloo":
        await side.engine.send_weights(iter(side.model.items()), 1)
    else:
        await Bare(mailbox, side.bucket).send(iter(side.model.items()))


async def _take(side: Side, way: str, mailbox: Any, dies: bool) -> None:
    bare = Bare(mailbox, side.bucket, side.rank - 1)
    weights = side.engine.receive_weights(1) if way == "gloo" else bare.receive()
    number = 0
    async for name, tensor in weights:
        number += 1
        if dies and number == len(side.model) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        side.model[name].copy_(tensor)


class Memory:
    """Follow the memory of processes, each shared page once."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._ended = pids, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def now(self) -> float:
        """Return megabytes."""
        total = 0
        for pid in self._pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    def __enter__(self) -> Memory:
        self.before = self.peak = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.after = self.now()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, self.now())


class Job:
    """The processes: a trainer and at most so many rollouts."""

    def __init__(self, rollouts: int, bucket: int) -> None:
        actor = ray.remote(Side).options(num_cpus=0)
        self.sides = [actor.remote(rank, bucket) for rank in range(rollouts + 1)]
        self._pids = ray.get([side.pid.remote() for side in self.sides])

    @property
    def pids(self) -> list[int]:
        """Of the processes that take part, of the object store, and of the engine's actor."""
        others = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_ours(path)]
        return self._pids[: len(self.sides)] + others

    def take_part(self, rollouts: int) -> None:
        """Leave all but so many rollouts out."""
        self.sides = self.sides[: rollouts + 1]

    def sync(self, way: str, dies: bool = False) -> tuple[float, list[float]]:
        """Return the seconds of the slowest process, and each one's sum of weights."""
        rollouts = len(self.sides) - 1
        mailbox = None
        if way == "gloo":
            metadata = ray.get([side.prepare.remote() for side in self.sides])
            topology = ray.get(self.sides[0].topology.remote(1, rollouts, metadata))
            joins = [
                {key: values[number] for key, values in part.items()}
                for part in topology
                for number in range(len(part["rank"]))
            ]
            ray.get([side.join.remote(**join) for side, join in zip(self.sides, joins, strict=True)])
        else:
            mailbox = ray.remote(Mailbox).options(num_cpus=0, max_concurrency=64).remote(rollouts)
            ray.get(mailbox.__ray_ready__.remote())
        calls = [
            side.sync.remote(way, mailbox, dies and number == rollouts)
            for number, side in enumerate(self.sides)
        ]
        if dies:
            try:
                ray.get(calls[-1])
            except ray.exceptions.RayActorError:
                began = time.perf_counter()
            try:
                ray.get(calls[0])
            except Exception:
                return time.perf_counter() - began, []
            raise AssertionError("the trainer did not notice")
        found = ray.get(calls)
        if way == "gloo":
            ray.get([side.finalize.remote() for side in self.sides])
        return max(seconds for seconds, _ in found), [total for _, total in found]


def _is_ours(path: Path) -> bool:
    try:
        command = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    if command[0].startswith(b"ray::Exchange"):
        return True
    session = str(ray._private.worker._global_node.session_name).encode()
    return command[0].endswith(b"/raylet") and session in b" ".join(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, nargs="+", default=[50, 350], help="millions of weights")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bucket", type=int, default=128, help="megabytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", type=int, default=2000, help="megabytes of the object store")
    parser.add_argument(
        "--directory", help="where the object store's memory is mapped, in place of Ray's choice"
    )
    options = quick.parse(parser, models=[4], rollouts=[1], bucket=2, rounds=1, store=100)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=options.store * 1_000_000,
        _plasma_directory=options.directory,
    )
    print(f"{'':34} {'seconds of a sync':>28} {'peak MB':>9} {'kept MB':>9}")
    ratios = []
    most = max(options.rollouts)
    job = Job(most, options.bucket << 20)
    ray.get([side.load.remote(1) for side in job.sides])
    job.sync("gloo")  # starts the engine's actor
    for rollouts in sorted(options.rollouts, reverse=True):
        job.take_part(rollouts)
        for millions in options.models:
            ray.get([side.load.remote(millions) for side in job.sides])
            ratios.append(_measure(job, millions, options.rounds))
    seconds = job.sync("gloo", dies=True)[0]
    print(f"a rollout killed in the middle: the trainer's error after {seconds:.1f} s")
    print(
        f"a sync takes {min(ratios):.2f} to {max(ratios):.2f} times the seconds of the bare way through Ray"
    )


def _measure(job: Job, millions: int, rounds: int) -> float:
    """Print a line per way; return the seconds of the engine over those of the bare way."""
    rollouts = len(job.sides) - 1
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, Memory] = {}
    for way in WAYS:
        with Memory(job.pids) as memory[way]:
            job.sync(way)
            time.sleep(1.0)
    for number in range(rounds):
        for way in WAYS[:: 1 if number % 2 else -1]:
            took, totals = job.sync(way)
            assert len(set(totals)) == 1, totals
            seconds[way].append(took)
    for way in WAYS:
        found, held = sorted(seconds[way]), memory[way]
        spread = f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
        name = f"{millions}M, {rollouts} rollout{'s' * (rollouts > 1)}, {way}"
        print(
            f"{name:34} {spread:>28} {held.peak - held.before:9.0f} {held.after - held.before:9.0f}",
            flush=True,
        )
    return median(seconds["gloo"]) / median(seconds["bare"])


if __name__ == "__main__":
    main()
