"""A Ray job for `test_worker_start`: prints, as JSON, what its workers and their processes are like."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import ray
import verl.trainer.main_ppo  # noqa: F401  what a driver of verl has imported


def facts() -> dict:
    """What a process inherits or draws at its start."""
    import numpy
    import torch

    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    status = Path("/proc/self/status").read_text()
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "forked": any(part.endswith(b"warm/server.py") for part in parent),
        "argv": [part.split("=")[0] for part in sys.argv],
        "path": sys.path,
        "main": sys.modules["__main__"].__dict__.get("__file__"),
        "flags": str(sys.flags),
        "folder": os.getcwd(),
        "umask": status.split("Umask:")[1].split()[0],
        "blocked": status.split("SigBlk:")[1].split()[0],
        "ignored": status.split("SigIgn:")[1].split()[0],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom": Path("/proc/self/oom_score_adj").read_text().strip(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "own_group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getsid(int(os.environ["DRIVER"])),
        "names": sorted(
            name for name in os.environ if not name.startswith(("AITER", "TILELANG", "TRITON", "TORCH"))
        ),
        "mine": os.environ.get("MINE"),
        "threads": (os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()),
        "drawn": (
            random.random(),
            float(numpy.random.rand()),
            multiprocessing.current_process().authkey.hex(),
        ),
    }


def end_with(connection, code: int) -> None:
    """In a spawned process: report, then end with a code, or wait to be ended."""
    connection.send({**facts(), "loaded": "vllm.v1.engine.core" in sys.modules})
    connection.close()
    if code < 0:
        time.sleep(600)
    os._exit(code)


@ray.remote(num_cpus=1)
class Worker:
    def look(self) -> dict:
        return {"loaded": "vllm.v1.engine.core" in sys.modules, **facts()}

    def spawn(self, code: int) -> dict:
        """Spawn a process, and end it by SIGKILL or SIGTERM where ``code`` is that signal, negative."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=end_with, args=(theirs, code))
        process.start()
        theirs.close()
        said = ours.recv()
        if code < 0:
            os.kill(process.pid, -code)
        process.join(60)
        try:
            ours.recv()
            ended = False
        except EOFError:
            ended = True
        gone = wait_for(lambda: not Path(f"/proc/{said['pid']}").exists())
        return {**said, "code": process.exitcode, "pipe_ended": ended, "gone": gone}

    def inspect(self) -> list:
        """What vLLM's process that looks at a model's class is like."""
        from vllm.model_executor.models import registry

        return registry._run_in_subprocess(
            lambda: [__import__("os").getppid(), __import__("sys").modules["__main__"].__name__]
        )

    def die(self) -> None:
        os._exit(7)


def wait_for(condition, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def main() -> None:
    os.environ["DRIVER"] = str(os.getpid())
    ray.init(
        num_cpus=12,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {"MINE": "1"}},
    )
    one, two = Worker.remote(), Worker.remote()
    other = Worker.options(runtime_env={"env_vars": {"VLLM_LOGGING_LEVEL": "ERROR"}}).remote()
    colder = Worker.options(num_cpus=4, runtime_env={"env_vars": {"VLLM_LOGGING_LEVEL": "ERROR"}}).remote()
    seen = {
        "one": ray.get(one.look.remote()),
        "two": ray.get(two.look.remote()),
        "other": ray.get(other.look.remote()),
        "inspection": ray.get(one.inspect.remote()),
        "four": ray.get(Worker.options(num_cpus=4).remote().look.remote()),
        "other_four": ray.get(colder.look.remote()),
        "spawned": [ray.get(one.spawn.remote(code)) for code in (0, 3, -signal.SIGKILL, -signal.SIGTERM)],
    }
    try:
        ray.get(two.die.remote())
    except ray.exceptions.RayActorError as error:
        seen["died"] = str(error)
    ray.kill(one)
    seen["killed"] = wait_for(lambda: not Path(f"/proc/{seen['one']['pid']}").exists())
    print("SEEN", json.dumps(seen))


if __name__ == "__main__":
    import worker_facts  # so that workers and spawned processes find its functions by name

    worker_facts.main()
