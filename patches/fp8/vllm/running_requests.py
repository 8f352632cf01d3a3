"""Track which requests have begun, and the LoRA adapters that they name; those that have not meet the next policy alone.

What a scheduler calls unfinished leaves out those that it holds back while the engine is paused. The scheduler may live in
another process than the workers. An engine core in this process is asked directly; otherwise the engine core reports to its
workers before each call that may carry an update."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.vllm_lora import worker_manager

if TYPE_CHECKING:
    from flashpatch.patches.fp8.vllm.scheduler_gate import SchedulerGate

_cores: weakref.WeakSet[Any] = weakref.WeakSet()
_reported: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by model runner


def track(core: Any) -> None:
    """Remember an engine core of this process."""
    _cores.add(core)


def running(runner: Any) -> bool:
    """Whether requests have begun on a model runner, as known in this process; None: on any."""
    reported = any(_reported.values()) if runner is None else _reported.get(runner, False)
    return reported or any(
        begun(core) for core in list(_cores) if runner is None or _driven_by(core) is runner
    )


def begun(core: Any) -> list[str]:
    """Return the requests that hold tokens or KV of the policy so far; one that was preempted waits with its tokens."""
    requests = (one for one in list(core.scheduler.requests.values()) if not one.is_finished())
    return [one.request_id for one in requests if one.num_computed_tokens or one.num_output_tokens]


def report(worker: Any, value: bool) -> None:
    """Store what the engine core reports; run on each worker by the engine core."""
    _reported[worker.model_runner] = value


def _driven_by(core: Any) -> Any:
    """Return the model runner that an engine core drives in its own process, or None."""
    worker = getattr(core.model_executor, "driver_worker", None)
    return None if worker is None else worker.model_runner


def numbers(core: Any) -> set[int]:
    """Return the numbers of the adapters that requests name."""
    named = (request.lora_request for request in core.scheduler.requests.values())
    return {one.lora_int_id for one in named if one is not None}


def unmet(core: Any, gate: SchedulerGate) -> tuple[list[str], str]:
    """Return requests that cannot have the adapter they name, for one reason, and that reason.

    vLLM looks at the number of an adapter alone, and loads what it has not within a step, where a failure ends the engine core.
    Here name and path count too, and an adapter that the workers do not hold yet is loaded."""
    found: dict[str, list[str]] = {}
    failed: dict[tuple[int, str, str], str] = {}
    for request in core.scheduler.requests.values():
        named = request.lora_request
        if named is None:
            continue
        number, wanted = named.lora_int_id, (named.lora_name, named.lora_path)
        reason = failed.get((number, *wanted), "")
        if number not in gate.holds and not reason:
            gate.workers_changed()
            reason = next(filter(None, gate.door.ask(worker_manager.bring, (named,))), "")
            if reason:
                failed[(number, *wanted)] = reason
            else:
                gate.holds[number] = wanted
        held = gate.holds.get(number, wanted)
        if held is None:
            reason = (
                f"number {number} of the LoRA adapters holds what {_said(wanted)} was before another number brought it anew. "
                "Name the number that was sent last, or send this one again by add_lora."
            )
        elif held != wanted:
            reason = (
                f"number {number} of the LoRA adapters holds {_said(held)}, and the request names {_said(wanted)}. "
                "Name what was sent last, or send the other one by add_lora under a number of its own."
            )
        if reason:
            found.setdefault(reason, []).append(request.request_id)
    return next(((requests, reason) for reason, requests in found.items()), ([], ""))


def move(core: Any, requests: Collection[str], holds: Mapping[int, tuple[str, str] | None]) -> None:
    """Let requests that have begun go on under what the numbers of their adapters hold by now."""
    for name in requests:
        request = core.scheduler.requests[name]
        named = request.lora_request
        held = None if named is None else holds.get(named.lora_int_id)
        if held is None or held == (named.lora_name, named.lora_path):
            continue
        request.lora_request = copy.copy(named)
        request.lora_request.lora_name, request.lora_request.lora_path = held
        request.block_hashes.clear()
        request.update_block_hashes()


def _said(adapter: tuple[str, str]) -> str:
    return "{!r} of {}".format(*adapter)
