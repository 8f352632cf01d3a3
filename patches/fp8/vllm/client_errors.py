"""Raise a refused request's reason in the client, in place of an empty completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.vllm import scheduler_gate
from flashpatch.record import Contract, Patch


def on_process_outputs(original, self, engine_core_outputs, *args: Any, **kwargs: Any):
    """Around ``OutputProcessor.process_outputs``.

    An asynchronous client receives the error in the request's own queue; a synchronous one from ``step``.
    """
    refused = [o for o in engine_core_outputs if str(o.stop_reason or "").startswith(scheduler_gate.MARK)]
    if not refused:
        return original(self, engine_core_outputs, *args, **kwargs)
    states = [self.request_states.get(output.request_id) for output in refused]
    queues = [state.queue for state in states if state is not None and state.queue is not None]
    error = PatchError(
        refused[0].stop_reason.removeprefix(scheduler_gate.MARK).strip(), patch=scheduler_gate.STEP.id
    )
    for queue in queues:
        queue.put(error)
    result = original(self, engine_core_outputs, *args, **kwargs)
    if len(queues) < sum(state is not None for state in states):
        raise error
    return result


def on_step(original, self):
    """Around ``LLMEngine.step``: abort all requests of this client when one is refused."""
    try:
        return original(self)
    except PatchError:
        self.abort_request(list(self.output_processor.request_states), internal=True)
        _step_with_others(original, self)
        raise


def _step_with_others(step: Callable[[Any], Any], client: Any) -> None:
    """Go on with empty batches while clients of other engines have requests that meet this engine in their forward.

    Such clients ask each other before each step ("offline" data parallelism); one that left would leave them waiting.
    """
    while getattr(client, "dp_group", None) is not None and client.has_unfinished_requests():
        step(client)


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    evidence="fault",
    scope=frozenset({"driver"}),
    remove_when="the scheduler gate is removed.",
)

STEP = _patch(
    id="fp8.vllm.llm_engine_step",
    targets=("vllm.v1.engine.llm_engine:LLMEngine.step",),
    wrapper=on_step,
    contract=Contract(
        mentions=("self.output_processor.process_outputs",),
        exists=(
            "vllm.v1.engine.llm_engine:LLMEngine.abort_request",
            "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests",
        ),
    ),
    needs=("fp8.vllm.process_outputs",),
    why="An exception out of step leaves the client's other requests in the engine; a later call gets them.",
    how="Aborts them before the refusal is raised, and first steps on with clients of other engines that share experts.",
)

PATCH = _patch(
    id="fp8.vllm.process_outputs",
    evidence="step",
    when="anywhere=fp8.vllm.worker_execute_model",
    targets=("vllm.v1.engine.output_processor:OutputProcessor.process_outputs",),
    wrapper=on_process_outputs,
    contract=Contract(
        params=("engine_core_outputs",),
        mentions=("self.request_states.get", "req_state.queue.put"),
    ),
    needs=("fp8.vllm.engine_core_step",),
    why="vLLM returns a request that ended in an error as an empty completion.",
    how="Raises the gate's reason for requests that the gate ended.",
)
