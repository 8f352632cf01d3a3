"""Fork Ray's workers from one process that has verl and vLLM imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from flashpatch import engine
from flashpatch.patches.cpu import accelerator
from flashpatch.patches.cpu.warm import session
from flashpatch.record import Contract, Patch
from flashpatch.settings import child_env

WORKER = "ray._private.worker"
SERVICES = "ray._private.services"
ID = "cpu.ray.start_ray_process"
COMMAND = "--python_worker_command="
IDLE = "--num_prestart_python_workers="

_session: session.Session | None = None
"""The server for the node that `ray.init` is starting right now."""


def on_init(original, *args: Any, **kwargs: Any) -> Any:
    """Around ``ray.init``: start a server with the job's environment where it will start a node."""
    global _session

    environment = None if args else _environment(kwargs)
    _session = started = None if environment is None else session.start(environment)
    try:
        return original(*args, **kwargs)
    finally:
        _session = None
        if started is not None:
            started.ray_started()


def on_start_process(
    original, command: list[str], process_type: str, fate_share: bool, *args: Any, **kwargs: Any
) -> Any:
    """Around ``start_ray_process``: a raylet that ends with this process gets the launcher as interpreter."""
    global _session

    commands = [part for part in command if part.startswith(COMMAND)]
    interpreter = COMMAND + subprocess.list2cmdline([sys.executable])
    if (
        _session is None
        or not fate_share
        or len(commands) != 1
        or not commands[0].startswith(f"{interpreter} ")
    ):
        return original(command, process_type, fate_share, *args, **kwargs)
    from ray import JobID

    launched = COMMAND + subprocess.list2cmdline([_session.script]) + commands[0].removeprefix(interpreter)
    command = [launched if part.startswith(COMMAND) else part for part in command]
    command = [f"{IDLE}0" if part.startswith(IDLE) else part for part in command]
    info = original(command, process_type, fate_share, *args, **kwargs)
    _session.follow(info.process.pid, JobID.from_int(1).hex())  # a new cluster's first job, which is ours
    _session = None
    return info


def _environment(kwargs: Mapping[str, Any]) -> dict[str, str] | None:
    """The environment of the job's workers; None where others start them or they need another Python."""
    import ray

    wanted = engine.options("cpu")["fork_workers"] and sys.platform.startswith("linux")
    if not wanted or "verl" not in sys.modules or accelerator.found():
        return None
    given = {name: value for name, value in (kwargs.get("runtime_env") or {}).items() if value}
    elsewhere = kwargs.get("address") or os.environ.get("RAY_ADDRESS") or kwargs.get("local_mode")
    if elsewhere or ray.is_initialized() or given.keys() - {"env_vars"}:
        return None
    return {**os.environ, **child_env.ray_env(), **given.get("env_vars", {})}


INIT = Patch(
    id="cpu.ray.init",
    targets=(f"{WORKER}:init",),
    requires="ray>=2.50",
    wrapper=on_init,
    contract=Contract(params=("address", "local_mode", "runtime_env")),
    evidence="optional",
    scope=frozenset({"driver"}),
    needs=("cpu.verl.register_platform",),
    why="Every process of a job imports torch, transformers, verl and vLLM for itself: on two cores that is "
    "most of the time until the first step.",
    how="Before this process starts a Ray of its own, starts one process that imports them once, with the "
    "environment of the job's workers. A job with a runtime environment of other packages or folders goes on without.",
    remove_when="Ray forks its workers from a process that has modules imported.",
)

COMMANDS = Patch(
    id=ID,
    targets=(f"{SERVICES}:start_ray_process",),
    requires="ray>=2.50",
    wrapper=on_start_process,
    contract=Contract(
        params=("command", "process_type", "fate_share"),
        exists=(
            f"{SERVICES}:start_raylet",
            "ray._private.runtime_env.context:RuntimeEnvContext.exec_worker",
            "ray._private.utils:set_omp_num_threads_if_unset",
            "ray._private.utils:update_envs",
            "ray._private.workers.setup_worker:parser",
        ),
    ),
    evidence="optional",
    scope=frozenset({"driver"}),
    needs=("cpu.ray.init",),
    why="Ray executes a new interpreter for each worker.",
    how="Gives the raylet a script in the interpreter's place. It asks the process that `cpu.ray.init` started for "
    "a fork, where command line and environment allow it, stands for the fork until that ends, and runs the "
    "interpreter otherwise. multiprocessing starts vLLM's processes the same way, and vLLM the one that looks at a "
    "model's class. Workers that Ray would start in "
    "advance, without a job, are left out: verl's have a runtime environment, which those do not.",
    remove_when="Ray forks its workers from a process that has modules imported.",
)
