"""Ray's workers are forked from one process that has verl and vLLM imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from flashpatch.patches.cpu import accelerator
from flashpatch.patches.cpu.warm import session
from flashpatch.record import Contract, Patch

WORKER = "ray._private.worker"
SERVICES = "ray._private.services"
ID = "cpu.ray.start-worker"
COMMAND = "--python_worker_command="

_session: session.Session | None = None
"""The server for the node that `ray.init` is starting right now."""


def on_init(original, *args: Any, **kwargs: Any) -> Any:
    """Around ``ray.init``: start the server with the job's environment when a node of our own will be started."""
    global _session

    environment = None if args else _environment(kwargs)
    _session = None if environment is None else session.start(environment)
    try:
        return original(*args, **kwargs)
    finally:
        unused, _session = _session, None
        if unused is not None:
            unused.close()


def on_start_process(
    original, command: list[str], process_type: str, fate_share: bool, *args: Any, **kwargs: Any
) -> Any:
    """Around ``start_ray_process``: a raylet that ends with this process gets the launcher as interpreter."""
    global _session

    at = [number for number, part in enumerate(command) if part.startswith(COMMAND)]
    interpreter = subprocess.list2cmdline([sys.executable])
    if _session is None or not fate_share or len(at) != 1 or not _begins(command[at[0]], interpreter):
        return original(command, process_type, fate_share, *args, **kwargs)
    rest = command[at[0]].removeprefix(COMMAND + interpreter)
    command = [
        *command[: at[0]],
        COMMAND + subprocess.list2cmdline([_session.script]) + rest,
        *command[at[0] + 1 :],
    ]
    from ray import JobID

    info = original(command, process_type, fate_share, *args, **kwargs)
    _session.follow(info.process.pid, JobID.from_int(1).hex())  # a new cluster's first job, which is ours
    _session = None
    return info


def _begins(argument: str, interpreter: str) -> bool:
    return argument.startswith(f"{COMMAND}{interpreter} ")


def _environment(kwargs: Mapping[str, Any]) -> dict[str, str] | None:
    """The environment that the job's workers will have; None where they are not ours to start, or need another Python."""
    import ray

    if "verl" not in sys.modules or accelerator.found():
        return None
    given = {name: value for name, value in (kwargs.get("runtime_env") or {}).items() if value}
    elsewhere = kwargs.get("address") or os.environ.get("RAY_ADDRESS") or kwargs.get("local_mode")
    if (
        not sys.platform.startswith("linux")
        or elsewhere
        or ray.is_initialized()
        or given.keys() - {"env_vars"}
    ):
        return None
    return {**os.environ, **given.get("env_vars", {})}


INIT = Patch(
    id="cpu.ray.init",
    targets=(f"{WORKER}:init",),
    requires="ray>=2.50",
    wrapper=on_init,
    contract=Contract(params=("address", "local_mode", "runtime_env")),
    evidence="fault",
    scope=frozenset({"driver"}),
    needs=("cpu.verl.register_platform",),
    tested=("2.60.0",),
    why="Every process of a job imports torch, transformers, verl and vLLM for itself: on two cores that is most of the "
    "time until the first step.",
    how="Before this process starts a Ray of its own, starts one process that imports them once, with the environment of "
    "the job's workers. A job with a runtime environment of other packages or folders goes on without.",
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
    evidence="fault",
    scope=frozenset({"driver"}),
    needs=("cpu.ray.init",),
    tested=("2.60.0",),
    why="Ray executes a new interpreter for each worker.",
    how="Gives the raylet a script in the interpreter's place. It has the process forked that `cpu.ray.init` started, where "
    "command line and environment allow it, stands for the fork until that ends, and runs the interpreter otherwise. "
    "multiprocessing starts vLLM's processes the same way.",
    remove_when="Ray forks its workers from a process that has modules imported.",
)
