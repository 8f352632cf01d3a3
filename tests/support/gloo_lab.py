"""The checkpoint engine gloo in real processes, as verl's manager drives it, with one thing going wrong.

``python gloo_lab.py SECONDS CASE...`` runs the cases one after the other, each for as many seconds at most, and prints
one JSON object: case to role to what became of its last call. Each process is a driver of one Ray that all cases use;
verl's calls come over pipes, since forking is faster than an actor that imports verl. Trainers and rollouts have default
process groups of their own."""

import asyncio
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STEP, BUCKET, FAULT_AT = 7, 100_000, 25  # version; bytes; number of the tensor at which something happens
PATIENCE = float(os.environ.get("GLOO_LAB_PATIENCE", "2"))  # seconds: the engine's where somebody never comes
TIMEOUT = 3600.0  # seconds: a case that waited for it hangs


@dataclass(frozen=True)
class Case:
    """What goes wrong."""

    fault: str = ""  # what happens at tensor `FAULT_AT`, or before
    where: str = "rollout1"  # role in which it happens
    trainers: int = 1  # trainers, rollouts: numbers of processes
    rollouts: int = 2
    timeout: float = TIMEOUT  # seconds of the engine
    again: tuple[str, ...] = ()  # roles that take part in a second transfer, without the fault


EVERYBODY = ("trainer0", "rollout1", "rollout2")
CASES = {
    "plain": Case(),
    "two-trainers": Case(trainers=2, rollouts=1),
    "no-rollout": Case(trainers=2, rollouts=0),
    "slow": Case("slow", timeout=2.0),
    "sender-raises": Case("raise", "trainer0", again=EVERYBODY),
    "sender-killed": Case("kill", "trainer0"),
    "sender-stopped": Case("stop", "trainer0", timeout=PATIENCE),
    "receiver-raises": Case("raise", again=EVERYBODY),
    "receiver-leaves": Case("leave"),
    "receiver-killed": Case("kill", again=("trainer0", "rollout2")),
    "receiver-stopped": Case("stop", timeout=PATIENCE),
    "other-version": Case("version"),
    "stale": Case("stale", timeout=PATIENCE),
    "flipped": Case("flip", again=EVERYBODY),
    "lost": Case("lose"),
    "exchange-killed": Case("kill-exchange", "trainer0", again=EVERYBODY),
}


def weights() -> list[tuple[str, Any]]:
    """Return tensors of many dtypes, sizes and strides: small ones, some larger than a bucket, empty ones."""
    import torch

    random = torch.Generator().manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
    found = [
        (f"layers.{i}.weight", torch.randn(i + 1, 997, generator=random).to(kinds[i % len(kinds)]))
        for i in range(40)
    ]
    found += [
        ("huge", torch.randn(7, 13, 1009, generator=random)),
        ("transposed", torch.randn(300, 411, generator=random).t()),
        ("exactly-a-bucket", torch.arange(BUCKET, dtype=torch.int64).to(torch.uint8)),
        ("bytes", torch.arange(3, dtype=torch.uint8)),
        ("flags", torch.tensor([True, False, True])),
        ("empty", torch.empty(0, 4, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(3.5)),
        ("huge-last", torch.randn(3 * BUCKET // 8, generator=random, dtype=torch.float64)),
    ]
    return found


def digest(tensors: list[tuple[str, Any]]) -> str:
    """Return a digest of names, dtypes, shapes and bytes, in order."""
    import torch

    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# -- in the processes ----------------------------------------------------------------------------------


class Worker:
    """One process of a case.

    Attributes:
        taken: tensors that the generator gave, or that arrived."""

    def __init__(self, case: Case, role: str, index: int, folder: str) -> None:
        import torch.distributed as dist

        from flashpatch.patches.cpu.checkpoint_engine import ObjectStoreEngine

        side = role.rstrip("0123456789")
        size = case.trainers if side == "trainer" else case.rollouts
        dist.init_process_group("gloo", init_method=f"file://{folder}/{side}", rank=index, world_size=size)
        self.fault = case.fault if role == case.where else ""
        self.sends = side == "trainer"
        self.engine = ObjectStoreEngine(BUCKET, is_master=role == "trainer0", timeout_seconds=case.timeout)
        self.taken = 0

    def prepare(self) -> dict[str, Any]:
        return self.engine.prepare()

    def init(self, rank: int, join: dict[str, Any], peers: dict[int, str]) -> None:
        if self.fault == "stale":
            join = {**join, "transfer": join["transfer"] - 1}
        self.engine.init_process_group(rank, join, peers)

    def transfer(self, step: int) -> dict[str, Any]:
        if self.fault in ("flip", "lose"):
            self._change_what_arrives()
        if self.sends:
            return {"metrics": asyncio.run(self.engine.send_weights(self._gathered(), step))}
        return asyncio.run(self._load(step))

    def finalize(self) -> None:
        self.engine.finalize()

    def _gathered(self):
        """Yield the weights after a collective for each, as FSDP's export does."""
        import torch
        import torch.distributed as dist

        for self.taken, (name, tensor) in enumerate(weights(), 1):
            dist.all_reduce(torch.ones(1))
            if self.taken == FAULT_AT:
                self._happen()
            yield name, tensor

    async def _load(self, step: int) -> dict[str, Any]:
        """Load weights in a task of its own, as Ray does."""
        return await asyncio.create_task(self._loaded(step))

    async def _loaded(self, step: int) -> dict[str, Any]:
        kept = []
        async for name, tensor in self.engine.receive_weights(step + (self.fault == "version")):
            kept.append((name, tensor))
            self.taken = len(kept)
            if self.taken == FAULT_AT:
                self._happen()
                if self.fault == "leave":
                    break
            if self.fault == "slow":
                time.sleep(0.1)  # of 48 tensors: in all longer than the time-out
        return {"digest": digest(kept)}

    def _happen(self) -> None:
        if self.fault == "raise":
            raise ArithmeticError("no weights today")
        if self.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        if self.fault == "kill-exchange":
            import ray

            ray.kill(self.engine._exchange)

    def _change_what_arrives(self) -> None:
        """Change a bit of the last tensor in the second bucket, or forget one small tensor."""
        from flashpatch.patches.cpu.buckets import Joiner

        take = Joiner.take

        def changed(joiner: Any, pieces: list[Any]) -> Any:
            if self.fault == "lose":
                pieces = [piece for piece in pieces if piece.name != "layers.3.weight"]
            elif self.fault and joiner.contents.buckets == 2:
                data = pieces[-1].data.copy()
                data[-1] ^= 1
                pieces = [*pieces[:-1], pieces[-1]._replace(data=data)]
            return take(joiner, pieces)

        Joiner.take = changed


def serve(case: Case, role: str, index: int, folder: str, address: str, calls: Connection) -> None:
    """Run the calls that come over the pipe."""
    import ray

    ray.init(address, namespace="lab", log_to_driver=False)
    calls.send(("connected", None))
    worker = Worker(case, role, index, folder)
    calls.send(("made", None))
    while True:
        try:
            method, kwargs = calls.recv()
        except EOFError:
            return
        if method == "heal":
            worker.fault = ""
            calls.send(("healed", None))
            continue
        began = time.monotonic()
        outcome = {"call": method, "error": None}
        try:
            outcome["answer"] = getattr(worker, method)(**kwargs)
        except BaseException as problem:
            outcome["error"] = f"{type(problem).__name__}: {problem}"
        outcome.update(seconds=time.monotonic() - began, taken=worker.taken)
        calls.send(("done", outcome))


# -- in the driver -------------------------------------------------------------------------------------


class Driver:
    """Drive the processes of a case as ``CheckpointEngineManager.update_weights`` does."""

    def __init__(self, case: Case, deadline: float, address: str) -> None:
        fork = multiprocessing.get_context("fork")
        self._case, self._deadline = case, deadline
        self._folder = tempfile.mkdtemp()
        self._pipes: dict[str, Connection] = {}
        self._processes: dict[str, Any] = {}
        roles = [(f"trainer{i}", i) for i in range(case.trainers)]
        roles += [(f"rollout{i + 1}", i) for i in range(case.rollouts)]
        for role, index in roles:
            here, there = fork.Pipe()
            others = [*self._pipes.values(), here]
            process = fork.Process(
                target=_only,
                args=(others, serve, case, role, index, self._folder, address, there),
                daemon=True,
            )
            process.start()
            there.close()
            here.recv()  # one connects at a time: forked from one, they draw the same numbers for Ray's first object
            self._pipes[role] = here
            self._processes[role] = process
        for pipe in self._pipes.values():
            pipe.recv()

    def call(self, method: str, kwargs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Call a method in the named roles at the same time, and return what became of each."""
        for role, given in kwargs.items():
            self._pipes[role].send((method, given))
        return {role: self._answer(role) for role in kwargs}

    def _answer(self, role: str) -> Any:
        while not self._pipes[role].poll(0.1):
            if time.monotonic() > self._deadline or self._is_stopped(role):
                return {"error": "hung"}
        try:
            return self._pipes[role].recv()[1]
        except (EOFError, ConnectionResetError):
            return {"error": "killed"}

    def _is_stopped(self, role: str) -> bool:
        """Whether the role has stopped itself, and will not answer any more."""
        if self._case.fault != "stop" or role != self._case.where:
            return False
        stat = Path(f"/proc/{self._processes[role].pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def transfer(self, roles: tuple[str, ...], step: int) -> dict[str, Any]:
        """Run one whole transfer, up to the first call that fails somewhere."""
        from flashpatch.patches.cpu.checkpoint_engine import ObjectStoreEngine

        trainers = [role for role in roles if role.startswith("trainer")]
        metadata = [found["answer"] for found in self.call("prepare", {role: {} for role in roles}).values()]
        topology = ObjectStoreEngine.build_topology(len(trainers), len(roles) - len(trainers), metadata)
        joins = [
            {name: values[i] for name, values in side.items()}
            for side in topology
            for i in range(len(side["rank"]))
        ]
        found = self.call("init", dict(zip(roles, joins, strict=True)))
        if all(outcome["error"] is None for outcome in found.values()):
            found = self.call("transfer", {role: {"step": step} for role in roles})
        if all(outcome["error"] is None for outcome in found.values()):
            self.call("finalize", {role: {} for role in roles})
        return found

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def _only(others: list[Connection], function: Any, *args: Any) -> None:
    """In the child: without the other ends of pipes, so that a death is seen."""
    for pipe in others:
        pipe.close()
    function(*args)


def run(case: Case, seconds: float, address: str) -> dict[str, Any]:
    """Return what became of every role in the first transfer, and under ``again`` in the second."""
    driver = Driver(case, time.monotonic() + seconds, address)
    try:
        roles = tuple(driver._pipes)
        found = driver.transfer(roles, STEP)
        if case.again:
            driver.call("heal", {role: {} for role in case.again})
            found["again"] = driver.transfer(case.again, STEP + 1)
        return found
    finally:
        driver.end()


def keep_ray(started: Connection, ended: Connection) -> None:
    """Run a Ray until the other end of ``ended`` is closed; in a process of its own, as the driver forks."""
    import ray
    import ray_start

    ray_start.ask_again()
    context = ray.init(
        num_cpus=0, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False
    )
    started.send(context.address_info["address"])
    ended.poll(None)
    ray.shutdown()


def main(seconds: float, cases: list[str]) -> None:
    import torch

    import flashpatch.patches.cpu.checkpoint_engine  # noqa: F401

    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    (here, started), (ended, end) = fork.Pipe(), fork.Pipe()
    keeper = fork.Process(target=_only, args=([here, end], keep_ray, started, ended))
    keeper.start()
    try:
        address = here.recv()
        results = {name: run(CASES[name], seconds, address) for name in cases}
    finally:
        end.close()
        keeper.join()
    print(json.dumps({"digest": digest(weights()), "cases": results}))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
