"""Let a request be scheduled only under the LoRA adapter that it names, by number, name and path.

vLLM looks at the number alone, and loads what it has not within a step, where a failure ends the engine core.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.vllm_lora import worker_manager

if TYPE_CHECKING:
    from flashpatch.patches.fp8.vllm.scheduler_gate import SchedulerGate


def numbers(core: Any) -> set[int]:
    """Return the numbers of the adapters that requests name."""
    named = (request.lora_request for request in core.scheduler.requests.values())
    return {one.lora_int_id for one in named if one is not None}


def unmet(core: Any, gate: SchedulerGate) -> tuple[list[str], str]:
    """Return requests that cannot have the adapter they name, for one reason, and that reason.

    An adapter that the workers do not hold yet is loaded.
    """
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
        if held != wanted:
            reason = (
                f"number {number} of the LoRA adapters holds {_said(held)}, and the request names {_said(wanted)}. "
                "Name what was sent last, or send the other one by add_lora under a number of its own."
            )
        if reason:
            found.setdefault(reason, []).append(request.request_id)
    return next(((requests, reason) for reason, requests in found.items()), ([], ""))


def move(core: Any, requests: Collection[str], holds: Mapping[int, tuple[str, str]]) -> None:
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
