"""Whether a process may be forked although its environment differs from the one the server imported with."""

from __future__ import annotations

import os
from collections.abc import Mapping

USED_LATE = frozenset(
    {
        # ranks and meeting points, set per worker by verl and torch and read when a process group is made
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DIST_INIT_METHOD",
        "WG_PREFIX",
        "WG_BACKEND",
        "REDIS_STORE_SERVER_HOST",
        "VERL_RAY_JOB_ID",
        "VERL_REPLICA_RANK",
        # read by Ray when it renames the process, and by its Python code when that connects
        "SPT_NOENV",
        "RAY_LD_PRELOAD_ON_WORKERS",
        "RAY_LOCAL_WORLD_SIZE",
        "RAY_LOCAL_RANK",
        "RAY_ADDRESS",
        # read by vLLM when an engine or a model is made, and by breakpoint()
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "PYTHONBREAKPOINT",
        # read when numexpr is imported, which the server does not
        "NUMEXPR_MAX_THREADS",
        # obeyed again after the fork, see `commands`
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        # there is no accelerator
        "CUDA_VISIBLE_DEVICES",
        "NCCL_CUMEM_ENABLE",
        "NVIDIA_VISIBLE_DEVICES",
        # set by shells
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
    }
)
"""Variables that no module of the server reads while it is imported."""

PREFIXES_USED_LATE = ("VLLM_CPU_",)
"""vLLM's settings for the CPU are read when an engine is made."""

PRELOADED = "LD_PRELOAD"
OPENMP = ("libgomp", "libiomp5", "libomp")


def hindrances(
    wanted: Mapping[bytes, bytes], imported_with: Mapping[bytes, bytes], set_by_imports: Mapping[bytes, bytes]
) -> list[str]:
    """Names of the variables that differ and that some import may have read, in order.

    Args:
        wanted: the environment asked for.
        imported_with: the server's before its imports.
        set_by_imports: what those set; a process that another one starts after the same imports has it too.
    """
    names = {name for name in {*wanted, *imported_with} if wanted.get(name) != imported_with.get(name)}
    names -= {name for name in names if name in wanted and wanted[name] == set_by_imports.get(name)}
    if os.fsencode(PRELOADED) in names and _is_loaded(wanted, imported_with):
        names.remove(os.fsencode(PRELOADED))
    return sorted(name for name in map(os.fsdecode, names) if not used_late(name))


def used_late(name: str) -> bool:
    """Whether a variable is only read by what runs after the imports."""
    return name in USED_LATE or name.startswith(PREFIXES_USED_LATE)


def _is_loaded(wanted: Mapping[bytes, bytes], imported_with: Mapping[bytes, bytes]) -> bool:
    """Whether ``LD_PRELOAD`` only adds OpenMP libraries that this process has loaded.

    vLLM names torch's there, so that a process has one. Libraries that replace functions of others, such as
    allocators, must come first.
    """
    was, now = (
        {*env.get(os.fsencode(PRELOADED), b"").split(b":")} - {b""} for env in (imported_with, wanted)
    )
    with open("/proc/self/maps", "rb") as file:
        loaded = {line.split(maxsplit=5)[-1].rstrip(b"\n") for line in file}
    added = now - was
    openmp = all(os.path.basename(os.fsdecode(path)).startswith(OPENMP) for path in added)
    return was <= now and openmp and {os.fsencode(os.path.realpath(path)) for path in added} <= loaded
