"""Pass the selection to child processes in environment variables, and through the lists that filter them.

A local child inherits the environment. Ray's workers have that of the node they run on, which on a cluster that was running
before is not the driver's: what is to reach them must be in the job's runtime environment, and ``ray.init`` lets a hook named in
``RAY_RUNTIME_ENV_HOOK`` add to it (``ray/_private/worker.py``). vLLM copies only variables with certain prefixes or named in
``VLLM_RAY_EXTRA_ENV_VARS_TO_COPY`` (``vllm/ray/ray_env.py``)."""

from __future__ import annotations

import os

from flashpatch import user_directories
from flashpatch.errors import closest
from flashpatch.ledger import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OURS = "CONFIG STRICT LEDGER LEDGER_RAY JOB_LEDGER KEEP_DAYS KEEP_RUNS EVENT_BYTES CACHE LOG RUN BEGUN ENGINE RESOLVED"
VARIABLES = "FLASHPATCH", *(f"FLASHPATCH_{name}" for name in _OURS.split())

VLLM_LIST = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
OUR_HOOK = "flashpatch.settings.child_env.ray_runtime_env"


def export(asked: str, resolved: str) -> None:
    """Set ``FLASHPATCH`` and ``FLASHPATCH_RESOLVED`` for children, put our variables on vLLM's list and our hook into Ray's.

    Relative directories become absolute, since workers run in other ones. A hook of other code stays:
    code is never taken from a variable of ours, so it could not be called in turn."""
    _set("FLASHPATCH", asked)
    _set("FLASHPATCH_RESOLVED", resolved)
    for name in ("FLASHPATCH_LEDGER", "FLASHPATCH_CACHE"):
        folder = os.environ.get(name, "")
        if folder and folder != "0":
            _set(name, os.path.abspath(user_directories.expand(folder)))
    _list(add=True)
    hook = os.environ.get(RAY_HOOK)
    if not hook:
        os.environ[RAY_HOOK] = OUR_HOOK
    elif hook != OUR_HOOK:
        import logging

        logging.getLogger("flashpatch").warning(
            "%s is %s already, so Ray workers on a cluster that was running before do not get our variables: "
            "have it return %s(runtime_env)",
            RAY_HOOK,
            hook,
            OUR_HOOK,
        )


def withdraw() -> None:
    """Undo `export`. The run id stays, since this process's row belongs to that run."""
    os.environ.pop("FLASHPATCH", None)
    os.environ.pop("FLASHPATCH_RESOLVED", None)
    _list(add=False)
    if os.environ.get(RAY_HOOK) == OUR_HOOK:
        del os.environ[RAY_HOOK]


def ray_env() -> dict[str, str]:
    """Our variables that are set, for ``runtime_env={"env_vars": ...}`` of a Ray job or actor; all processes
    of the job write to this process's ledger, see `flashpatch.ledger.files.directory` for other nodes."""
    ours = {name: os.environ[name] for name in (*VARIABLES, VLLM_LIST) if name in os.environ}
    return {**ours, "FLASHPATCH_JOB_LEDGER": str(files.directory())} if "FLASHPATCH" in ours else ours


def ray_runtime_env(runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ray's hook: the job's runtime environment with our variables in it, unless it sets them itself.

    Ray calls it in ``ray.init`` after a submitted job's own environment was merged in."""
    ours = ray_env()
    if "FLASHPATCH" not in ours:
        return runtime_env
    given = dict(runtime_env or {})
    return {**given, "env_vars": {**ours, **(given.get("env_vars") or {})}}


def _set(name: str, value: str) -> None:
    """Set a variable unless it is set so: overwriting an inherited one would end ``setproctitle``'s power to rename the process."""
    if os.environ.get(name) != value:
        os.environ[name] = value


def _list(add: bool) -> None:
    """Add our names to vLLM's list or remove them; names that others put there stay in place."""
    listed = [name.strip() for name in os.environ.get(VLLM_LIST, "").split(",") if name.strip()]
    others = [name for name in listed if name not in VARIABLES]
    wanted = [*others, *VARIABLES] if add else others
    if wanted:
        _set(VLLM_LIST, ",".join(wanted))
    else:
        os.environ.pop(VLLM_LIST, None)


def unknown() -> list[str]:
    """Return a sentence for each variable of this process that begins or is spelt almost as FlashPatch's and is none."""
    names, known = sorted(os.environ.keys() - {*VARIABLES}), [name.lower() for name in VARIABLES]
    near = {name: closest(name, known, 0.5 if name.startswith("FLASHPATCH") else 0.85) for name in names}
    meant = {name: found.upper() for name, found in near.items() if found}
    return [f"{name} is no variable of FlashPatch; did you mean {meant[name]}?" for name in meant]
