"""verl's own sender and receiver in two processes, over real zmq and shared memory, with one thing going wrong.

``python transfer_lab.py SECONDS TOGETHER CASE...`` runs that many cases at a time, each for as many seconds at most,
and prints one JSON object: case to role to what became of it. Only Ray is replaced, by pipes: the trainer's side is
verl's `ServerAdapter`, the rollout worker's side verl's `vLLMColocateWorkerExtension` without a model."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
import uuid
from concurrent.futures import Future

COUNT, SIZE = 5, 150_000  # tensors and their float32 elements: one bucket each
STEP = 7


def weights(case: str):
    """The trainer's generator."""
    import torch

    for number in range(COUNT):
        if number == 2 and case == "generator":
            raise ValueError("no weights today")
        if number == 2 and case == "sender-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and case == "sender-stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == 1 and case.startswith("job-"):
            time.sleep(3)  # the other job's transfer falls into this one's
        if number == 2 and case == "too-large":
            yield "huge", torch.zeros(SIZE * 4)
        yield f"w{number}", torch.full((SIZE,), float(number))


# -- the rollout worker --------------------------------------------------------------------------------


def worker_of(case: str, handle: str):
    import torch
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    class Worker(vLLMColocateWorkerExtension):
        def __new__(cls):
            return object.__new__(cls)

        device, rank, local_rank = torch.device("cpu"), 0, 0
        _is_qat_model = _is_modelopt_qat = False
        parallel_config = types.SimpleNamespace(world_size=1)
        model_runner = types.SimpleNamespace(vllm_config=None)
        seen: list[str] = []
        kept: list = []

        def _iter_all_models(self):
            if case == "before":
                raise LookupError("no such engine")
            return iter(())

        def _iter_all_models_with_config(self):
            if case == "after":
                raise ArithmeticError("could not post-process")
            return iter(())

        def _get_zmq_handle(self):
            return handle

        def _update_weights(self, weights, peft_config, base_sync_done):
            for name, tensor in weights:
                number = int(name[1:])
                assert tensor.eq(number).all()
                self.seen.append(name)
                if case == "keeps-view":
                    self.kept.append(tensor)
                if (case, number) in {("first", 0), ("middle", 2), ("last", COUNT - 1), ("alone", 2)}:
                    self.deep_inside(tensor)
                if case in ("worker-killed", "worker-killed-alone") and number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if case == "worker-stopped" and number == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)

        def deep_inside(self, view):
            raise LookupError("cannot place this tensor")

    return Worker()


def rollout(case: str, handle: str, calls, report) -> None:
    """Wait for the call, run it, answer; what became of it goes to ``report``."""
    kwargs = calls.recv()
    if case == "worker-killed-early":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    worker = worker_of(case, handle)
    try:
        answer, error = worker.update_weights_from_ipc(**kwargs), None
    except BaseException as problem:
        answer, error = None, f"{type(problem).__name__}: {problem}"
    report.send(outcome(error, began, names=worker.seen))
    calls.send((answer, error))


# -- the trainer ---------------------------------------------------------------------------------------


class Ref:
    """What verl uses of a Ray reference."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def future(self) -> Future:
        return self._future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()


class Remote:
    def __init__(self, function) -> None:
        self.remote = function


def server_of(calls):
    """The rollout server's handle: one real method, served by the other process."""

    def collective_rpc(method, timeout=None, args=(), kwargs=None):
        assert method == "update_weights_from_ipc"
        future: Future = Future()
        calls.send(kwargs)

        def wait() -> None:
            try:
                answer, error = calls.recv()
            except (EOFError, OSError):
                answer, error = None, "the engine is dead"
            future.set_exception(RuntimeError(error)) if error else future.set_result([answer])

        threading.Thread(target=wait, daemon=True).start()
        return Ref(future)

    def nothing(*args):
        future: Future = Future()
        future.set_result(None)
        return Ref(future)

    methods = dict(collective_rpc=collective_rpc, clear_kv_cache=nothing, set_global_steps=nothing)
    return types.SimpleNamespace(**{name: Remote(function) for name, function in methods.items()})


def trainer(case: str, handle: str, calls, report) -> None:
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    made, make = [], bucketed_weight_transfer.create_shared_memory
    bucketed_weight_transfer.create_shared_memory = lambda size, name: made.append(name) or make(size, name)
    adapter = object.__new__(ServerAdapter)
    adapter.replica_rank = adapter.rollout_rank = 0
    adapter.use_shm, adapter.zmq_handle = True, handle
    bucket = types.SimpleNamespace(update_weights_bucket_megabytes=1)
    adapter.config = types.SimpleNamespace(checkpoint_engine=bucket)
    adapter.model_config = {}  # no adapters
    adapter.server_handle = server_of(calls)
    adapter._has_server = not case.endswith("alone")
    if not adapter._has_server:  # another rank has made the call
        calls.send(ticket())
    if case == "sender-killed-early":
        adapter.server_handle.collective_rpc.remote("update_weights_from_ipc", kwargs=ticket())
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        asyncio.run(adapter.update_weights(weights(case), global_steps=STEP))
        error = None
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}"
    left = [name for name in made if os.path.exists(f"/dev/shm/{name}")]
    report.send(outcome(error, began, receipts=receipts(), left=left))


def ticket() -> dict:
    """What the adapter would send; nothing on stock verl."""
    from flashpatch import engine

    if not engine.enabled("fp8"):
        return {"use_shm": True}
    from flashpatch.patches.fp8.verl.transfer.weight_sync import TICKET, Sending

    return {"use_shm": True, TICKET: Sending(STEP).ticket()}


def receipts() -> list:
    module = sys.modules.get("flashpatch.patches.fp8.verl.transfer.weight_sync")
    return module.WEIGHT_SYNC.take_receipts() if module else []


# -- both ----------------------------------------------------------------------------------------------


def outcome(error: str | None, began: float, **more) -> dict:
    ended = "raised" if error else "returned"
    return {"ended": ended, "error": error, "seconds": time.monotonic() - began, **more}


def start(case: str) -> dict:
    fork = multiprocessing.get_context("fork")
    # two jobs that each have a Ray of their own come to the same name
    name = f"{os.getpid()}-shared" if case.startswith("job-") else uuid.uuid4().hex
    handle = f"ipc:///tmp/flashpatch-test-{name}.sock"
    here, there = fork.Pipe()
    roles = {}
    for name, function, pipe, other in (("worker", rollout, there, here), ("trainer", trainer, here, there)):
        listen, report = fork.Pipe(duplex=False)
        process = fork.Process(target=only, args=(function, case, handle, pipe, other, report), daemon=True)
        process.start()
        report.close()
        roles[name] = (process, listen)
    here.close()
    there.close()
    return roles


def collect(case: str, roles: dict, deadline: float) -> dict:
    """What became of both roles by the deadline; who has not ended by then hangs."""
    results = {}
    for name, (process, listen) in roles.items():
        results[name] = {"ended": "hung", "error": None}
        has_said = listen.poll(0.1)
        while not has_said and time.monotonic() < deadline:
            if case == f"{WORDS[name]}-stopped" and is_stopped(process.pid):
                break
            has_said = listen.poll(0.1)
        if has_said:
            try:
                results[name] = listen.recv()
            except EOFError:
                results[name] = {"ended": "killed", "error": None}
    for process, _ in roles.values():
        process.kill()
        process.join()
    return results


WORDS = {"worker": "worker", "trainer": "sender"}


def is_stopped(pid: int) -> bool:
    """Whether a process has stopped itself, and will not say anything any more."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def only(function, case, handle, pipe, other, report) -> None:
    """In the child: without the other's end of the pipe, so that the other's death is seen."""
    other.close()
    os.environ["FLASHPATCH_RUN"] = f"test-{case}"
    function(case, handle, pipe, report)
    time.sleep(3600)  # both live on after an update: ended at once, one may take its last answer along


def main(limit: float, together: int, cases: list[str]) -> None:
    import torch
    import verl.workers.rollout.vllm_rollout.utils
    import verl.workers.rollout.vllm_rollout.vllm_rollout  # noqa: F401

    torch.set_num_threads(1)
    results = {}
    for first in range(0, len(cases), together):
        started = [(case, start(case)) for case in cases[first : first + together]]
        deadline = time.monotonic() + limit
        results.update({case: collect(case, roles, deadline) for case, roles in started})
    print(json.dumps(results))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
