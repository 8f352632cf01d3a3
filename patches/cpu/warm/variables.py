"""Whether a process may be forked although its environment differs from the server's."""

from __future__ import annotations

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
        # counted again after the fork, see `commands.threads`
        "OMP_NUM_THREADS",
        # there is no accelerator
        "CUDA_VISIBLE_DEVICES",
        "NCCL_CUMEM_ENABLE",
        "NVIDIA_VISIBLE_DEVICES",
        # read when Ray renames the process
        "SPT_NOENV",
        # set by shells
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
    }
)
"""Variables that no module reads while it is imported."""

PREFIXES_USED_LATE = ("RAY_", "VLLM_CPU_")
"""Ray's configuration is read when a worker connects; vLLM's settings for the CPU when an engine is made."""


def hindrances(wanted: Mapping[bytes, bytes], imported_with: Mapping[bytes, bytes]) -> list[str]:
    """Names of the variables that differ and that some import may have read, in order."""
    names = {name for name in {*wanted, *imported_with} if wanted.get(name) != imported_with.get(name)}
    readable = (name.decode(errors="surrogateescape") for name in names)
    return sorted(name for name in readable if not used_late(name))


def used_late(name: str) -> bool:
    """Whether a variable is only read by what runs after the imports."""
    return name in USED_LATE or name.startswith(PREFIXES_USED_LATE)
