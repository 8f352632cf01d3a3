"""What a sync of differences costs beside one of all weights: bytes and seconds, trainer to rollout through Ray's object store.

    python benchmarks/delta.py [--weights 100] [--rounds 5] [--threads 1] [--json]

Needs verl, for FlashPatch's checkpoint engine gloo; no engine. Two processes: one sends random bf16 weights (so many millions, in
matrices of 4 million and norms), the other takes them until it holds all of them whole, as a rollout's client would. In each round: everything as verl sends it, then differences after so many values have changed by their last bit, at
random positions. share is bytes over those of everything, time seconds over those of everything, both medians over rounds with
the smallest and largest. Find and check are the seconds in which the sender looks for changes and computes fingerprints and
the receiver compares fingerprints; pays below is the bandwidth, in Gbit/s, under which the bytes that were saved take longer
than that."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import quick
import torch
import turns

from flashpatch.commands.report import Table, emit

SHARES = (0.01, 0.03, 0.1)
WIDE = 2048
BUCKET = 64 << 20


def main() -> None:
    parser = quick.parser(__doc__)
    parser.add_argument("--weights", type=int, default=100, help="millions of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--json", action="store_true")
    args = quick.parse(parser, weights=8, rounds=1)
    if find_spec("verl") is None:
        print("verl is not installed")
        return
    found = measure(args.weights, args.rounds, args.threads)
    rows = [
        [
            "all, as verl sends it" if one["changed"] is None else f"{one['changed']:.0%} changed",
            f"{one['MB']:.1f}",
            f"{one['seconds']:.3f}",
            one["share"],
            one["time"],
            *(f"{one[name]:.3f}" for name in ("find", "check")),
            f"{one['pays below']:.1f}" if one["pays below"] else "",
        ]
        for one in found
    ]
    columns = ("sent", "MB", "seconds", "share", "time", "find", "check", "pays below")
    title = f"One sync of {args.weights} million bf16 weights, {turns.cpu()}, {args.threads} thread(s)"
    emit(found, [Table(title, columns, rows)], args.json)


def measure(millions: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Run both sides; a row for everything, and one for each share of changed values."""
    with Sides(millions, threads) as sides:
        sides.sync("everything", 0.0)  # not counted: memory is touched for the first time
        runs: dict[float | None, list[dict[str, float]]] = {None: [], **{share: [] for share in SHARES}}
        for _ in range(rounds):
            runs[None].append(sides.sync("plain", 0.0))
            sides.sync("everything", 0.0)
            for share in SHARES:
                runs[share].append(sides.sync("differences", share))
    return [_row(share, mine, runs[None]) for share, mine in runs.items()]


def _row(share: float | None, mine: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: median(run[name] for run in mine) for name in mine[0]}
    cost = middle["find"] + middle["check"]
    saved = median(run["bytes"] for run in plain) - middle["bytes"]
    return {
        "changed": share,
        "MB": middle["bytes"] / 1e6,
        "seconds": middle["seconds"],
        "share": _ratio([one["bytes"] / all_["bytes"] for one, all_ in zip(mine, plain, strict=True)], 4),
        "time": _ratio([one["seconds"] / all_["seconds"] for one, all_ in zip(mine, plain, strict=True)], 2),
        "find": middle["find"],
        "check": middle["check"],
        "pays below": saved * 8 / cost / 1e9 if cost else None,
    }


def _ratio(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


class Sides:
    """Both processes, and what verl's manager does between them."""

    def __init__(self, millions: int, threads: int) -> None:
        import ray

        context = ray.init(num_cpus=0, include_dashboard=False, object_store_memory=2_000_000_000)
        self._pipes, self._processes = [], []
        spawn = multiprocessing.get_context("spawn")
        for rank in range(2):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=serve,
                args=(rank, millions, threads, context.address_info["address"], there),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._number = 0

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def sync(self, kind: str, share: float) -> dict[str, float]:
        """Change so many values, sync, and return bytes and seconds."""
        from flashpatch.patches.cpu.checkpoint_engine import ObjectStoreEngine

        self._number += 1
        self._all("train", [(share,)] * 2)
        metadata = self._all("prepare", [()] * 2)
        topology = ObjectStoreEngine.build_topology(1, 1, metadata)
        joins = [tuple(values[0] for values in side.values()) for side in topology]
        self._all("init_process_group", joins)
        sent, taken = self._all("sync", [(kind, self._number)] * 2)
        self._all("finalize", [()] * 2)
        return {**sent, "check": taken["check"], "seconds": max(sent["seconds"], taken["seconds"])}

    def _all(self, method: str, arguments: list[tuple]) -> list[Any]:
        for pipe, given in zip(self._pipes, arguments, strict=True):
            pipe.send((method, given))
        return [pipe.recv() for pipe in self._pipes]


class Side:
    """One process: the trainer's rank 0, or a rollout's."""

    def __init__(self, rank: int, millions: int, address: str) -> None:
        import ray

        from flashpatch.patches.cpu.checkpoint_engine import ObjectStoreEngine
        from flashpatch.patches.fp8.delta.receiver import Receiver
        from flashpatch.patches.fp8.delta.sender import Sender

        ray.init(address, namespace="delta", log_to_driver=False)
        self.rank = rank
        self.transfer = ObjectStoreEngine(BUCKET, is_master=rank == 0, timeout_seconds=600)
        self.random = torch.Generator().manual_seed(0)
        self.weights = dict(self._made(millions)) if rank == 0 else {}
        self.sender, self.receiver = Sender(), Receiver()

    def _made(self, millions: int) -> Any:
        for i in range(max(1, round(millions * 1e6 / WIDE**2))):
            yield f"layers.{i}.weight", torch.randn(WIDE, WIDE, generator=self.random).bfloat16()
            yield f"layers.{i}.norm", torch.randn(WIDE, generator=self.random).bfloat16()

    def train(self, share: float) -> None:
        for tensor in self.weights.values() if share else ():
            flat = tensor.view(-1).view(torch.int16)
            flat[torch.rand(flat.numel(), generator=self.random) < share] ^= 1

    def sync(self, kind: str, number: int) -> dict[str, float]:
        began = time.perf_counter()
        found = asyncio.run(self._send(kind, number) if self.rank == 0 else self._take(kind, number))
        return {**found, "seconds": time.perf_counter() - began}

    async def _send(self, kind: str, number: int) -> dict[str, float]:
        stream: Any = iter(self.weights.items())
        if kind != "plain":
            held = self.sender.version if kind == "differences" else None
            stream = self.sender.stream(stream, f"v{number}", held)
        sent = await self.transfer.send_weights(stream, number)
        self.sender.sent()
        return {
            "bytes": sent["gloo/bytes"],
            "find": self.sender.last.seconds if kind == "differences" else 0.0,
        }

    async def _take(self, kind: str, number: int) -> dict[str, float]:
        weights = self.transfer.receive_weights(number)
        if kind != "plain":
            weights = await self.receiver.take(weights)
            assert weights is not None, self.receiver.refused
        total = 0
        async for _, tensor in weights:
            total += tensor.nbytes
        if kind == "plain":
            return {"check": 0.0}
        self.receiver.commit()
        return {"check": self.receiver.facts["seconds"] if kind == "differences" else 0.0}


def serve(rank: int, millions: int, threads: int, address: str, calls: Connection) -> None:
    """Run the calls that come over the pipe."""
    torch.set_num_threads(threads)
    side = Side(rank, millions, address)
    while True:
        try:
            method, given = calls.recv()
        except EOFError:
            return
        calls.send(getattr(side if hasattr(side, method) else side.transfer, method)(*given))


if __name__ == "__main__":
    main()
