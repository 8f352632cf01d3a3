"""Follow verl's SGLang servers: launch them, return complete samples, and end one whose scheduler died.

SGLang's watchdog sends its own process SIGQUIT, whose handler ends it. In a Ray actor handlers run when Ray's loop comes back
to Python, which may be never: the server stays, answers nothing, and the trainer waits until its time limit."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Own, Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.verl.correction import mismatch
from flashpatch.patches.fp8.verl.expected_processes import of_requests, of_servers
from flashpatch.record import Patch

logger = logging.getLogger("flashpatch.fp8")

MODULE = "verl.workers.rollout.sglang_rollout.async_sglang_server"
SERVER, REPLICA = f"{MODULE}:SGLangHttpServer", f"{MODULE}:SGLangReplica"
REQUESTS = "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request"
WATCHDOG = "sglang.srt.utils.watchdog:SubprocessWatchdog"
GRACE = 10.0
"""Seconds that SGLang's own handler has to end the process."""

# What both generations share:
LAUNCH: Own = {
    "relies_on": (
        "dataclasses.fields",
        "ServerArgs",
        "Engine._launch_subprocesses",
        "self.scheduler_info",
        "sglang.srt.entrypoints.engine:Engine._launch_subprocesses",
        "sglang.srt.entrypoints.engine:SchedulerInitResult.scheduler_infos",
        "sglang.srt.entrypoints.http_server:get_global_state",
    ),
    "evidence": "optional",
    "why": "verl lists the fields of SGLang's ServerArgs as a dataclass's; from SGLang 0.5.20 on it is a msgspec struct, "
    "and verl ends with a TypeError. What verl keeps as scheduler_info is the tuple's third part: the ports.",
    "how": "Answer dataclasses.fields in verl's module for msgspec structs, and put the first scheduler's description where the "
    "server's endpoints look for it.",
    "upstream": "sglang/srt/server_args.py: ServerArgs(msgspec.Struct)",
    "remove_when": "verl asks ServerArgs for its fields in a way that both kinds answer.",
}
GENERATE: Own = {
    "relies_on": (
        "TokenOutput",
        "output_token_logprobs",
        f"{SERVER}.set_global_steps",
        "max_new_tokens",
        "verl.workers.rollout.replica:TokenOutput.extra_fields",
        "verl.workers.rollout.replica:TokenOutput.log_probs",
    ),
    "params": ("prompt_ids", "sampling_params", "request_id"),
    "why": "Where SGLang returns another number of log-probabilities than tokens, verl logs an error and trains on an "
    "empty answer; a request that SGLang refuses ends with an exception that Ray cannot pass on. In a mixed fleet the trainer "
    "cannot tell which samples come from an 8-bit replica.",
    "how": "Raise for such a sample, unless it was aborted, and with the refusal's text; add the replica's precision to the "
    "extra fields.",
    "remove_when": "verl raises, and its samples name their replica.",
}
CHECK: Own = {
    "relies_on": ("self._processes", "signal.SIGQUIT", f"{WATCHDOG}._monitor_loop"),
    "evidence": "optional",  # only a death calls for it
    "scope": "driver",
    "why": "SGLang's server ends itself by a signal when a scheduler dies; in verl's Ray actor that signal's handler may never "
    "run, and the trainer waits for a server that answers nothing.",
    "how": f"Kill the server and its children when it is still there {GRACE:g} s after the signal.",
    "remove_when": "SGLang's watchdog ends the process without a handler in the main thread.",
}

patches = Patches("fp8", "verl>=0.9", framework="verl_sglang", beside="sglang>=0.5.21", scope="driver")
servers = Patches("fp8", "verl>=0.9", framework="verl_sglang")
engines = Patches("fp8", "sglang>=0.5.21", tested=("0.5.21", "0.5.23"))  # SGLang imports these without verl


@patches.wrap(
    f"{SERVER}.launch_server",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.generate",
    **LAUNCH,
)
async def launch_server(original, self, *args: Any, **kwargs: Any) -> None:
    """See `launch`."""
    await launch(original, self, *args, **kwargs)


async def launch(original, self, *args: Any, **kwargs: Any) -> None:
    """Launch a server as `LAUNCH` says; raise if the family was refused, and number the replica for its engine."""
    from sglang.srt.entrypoints import http_server

    engine.require("fp8")
    os.environ.setdefault(fleet.VERL_REPLICA_RANK, str(self.replica_rank))  # as verl does for vLLM; by fleets
    with _fields_of_any_class(sys.modules[MODULE]), _scheduler_info() as started:
        await original(self, *args, **kwargs)
    if started:
        self.scheduler_info = started[0]
        state = http_server.get_global_state()
        if state is not None:
            state.scheduler_info = started[0]


def _fields_of_any_class(module: Any) -> AbstractContextManager[None]:
    """Let ``dataclasses.fields``, as ``module`` calls it, read classes of msgspec too."""

    def fields(kind: Any) -> tuple[Any, ...]:
        names = getattr(kind, "__struct_fields__", None)
        return dataclasses.fields(kind) if names is None else tuple(SimpleNamespace(name=n) for n in names)

    return having(module, "dataclasses", SimpleNamespace(fields=fields))


@contextmanager
def _scheduler_info() -> Iterator[list[dict[str, Any]]]:
    """Within, collect what the first scheduler of each launch tells about itself."""
    from sglang.srt.entrypoints.engine import Engine

    launch, found = Engine.__dict__["_launch_subprocesses"], []

    def launching(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = launch.__get__(None, cls)(*args, **kwargs)
        found.extend(info for part in result for info in getattr(part, "scheduler_infos", ())[:1])
        return result

    with having(Engine, "_launch_subprocesses", classmethod(launching)):
        yield found


@patches.wrap(
    f"{SERVER}.generate",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.launch_servers",
    **GENERATE,
)
async def generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """See `complete`."""
    return await complete(patches.of(generate), original, self, *args, **kwargs)


async def complete(
    patch: Patch, original, self, prompt_ids: Any, sampling_params: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Raise if verl drops a sample, and add the replica's precision in a mixed fleet.

    Args:
        patch: named by errors.
        original: verl's ``generate``, which gets the rest.

    Raises:
        PatchError: SGLang refused the request, whose own exception Ray cannot pass on; or it returned tokens and
            log-probabilities of different lengths."""
    from fastapi import HTTPException

    asked = bool(sampling_params.get("logprobs"))
    try:
        output = await original(self, prompt_ids, sampling_params, *args, **kwargs)
    except HTTPException as error:
        raise PatchError(
            f"SGLang refused a request (status {error.status_code}): {error.detail}.",
            patch=patch.id,
            target=patch.targets[0],
            advice="The server's log has the reason.",
        ) from error
    empty = asked and not output.token_ids and not output.log_probs
    if empty and output.stop_reason != "abort" and sampling_params.get("max_new_tokens", 1) > 0:
        raise PatchError(
            "SGLang returned a sample without tokens, or with another number of log-probabilities than tokens.",
            patch=patch.id,
            target=patch.targets[0],
            advice="verl would train on an empty answer. The server's log has both lengths.",
        )
    mismatch.note_precision(output, self.replica_rank)
    return output


launch_servers = of_servers(
    servers, REPLICA, "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.generate"
)
generate_request_synced = of_requests(engines, REQUESTS, "anywhere=fp8.verl_sglang.generate")


@engines.wrap(f"{WATCHDOG}._check_processes", **CHECK)
def check_processes(original, self, *args: Any, **kwargs: Any) -> bool:
    """Kill, in the watchdog's thread, what outlives SGLang's signal."""
    crashed = original(self, *args, **kwargs)
    if crashed:
        time.sleep(GRACE)  # SGLang's handler mostly ends the process meanwhile
        _end_process()
    return crashed


def _end_process() -> None:
    import psutil

    logger.error("a scheduler of this SGLang server died, and the server is still there: ending it")
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os.kill(os.getpid(), signal.SIGKILL)
