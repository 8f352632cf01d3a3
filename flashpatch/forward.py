"""The variables that carry the selection to other processes, and the lists that must let them through.

A local child inherits the environment. Ray starts workers with a new one, and vLLM copies only variables
with certain prefixes or named in ``VLLM_RAY_EXTRA_ENV_VARS_TO_COPY`` (``vllm/ray/ray_env.py``).
"""

from __future__ import annotations

import os

VARIABLES = (
    "FLASHPATCH",
    "FLASHPATCH_CONFIG",
    "FLASHPATCH_STRICT",
    "FLASHPATCH_LEDGER",
    "FLASHPATCH_LOG",
    "FLASHPATCH_RUN",
    "FLASHPATCH_RESOLVED",
)

VLLM_LIST = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def export(asked: str, resolved: str) -> None:
    """Set ``FLASHPATCH`` and ``FLASHPATCH_RESOLVED`` for children, and put our variables on vLLM's list.

    A relative ledger becomes absolute, since workers run in other directories.
    """
    os.environ["FLASHPATCH"] = asked
    os.environ["FLASHPATCH_RESOLVED"] = resolved
    ledger = os.environ.get("FLASHPATCH_LEDGER")
    if ledger:
        os.environ["FLASHPATCH_LEDGER"] = os.path.abspath(os.path.expanduser(ledger))
    _list(add=True)


def withdraw() -> None:
    """Take back what `export` set. The run id stays: this process's row belongs to that run for good."""
    os.environ.pop("FLASHPATCH", None)
    os.environ.pop("FLASHPATCH_RESOLVED", None)
    _list(add=False)


def ray_env() -> dict[str, str]:
    """Our variables that are set, for ``runtime_env={"env_vars": ...}`` of a Ray job or actor."""
    return {name: os.environ[name] for name in (*VARIABLES, VLLM_LIST) if name in os.environ}


def _list(add: bool) -> None:
    """Add our names to vLLM's list or remove them; names that others put there stay in place."""
    listed = [name.strip() for name in os.environ.get(VLLM_LIST, "").split(",") if name.strip()]
    others = [name for name in listed if name not in VARIABLES]
    wanted = [*others, *VARIABLES] if add else others
    if wanted:
        os.environ[VLLM_LIST] = ",".join(wanted)
    else:
        os.environ.pop(VLLM_LIST, None)
