"""Tell an engine's client why a request was refused, and refuse updates of engines that were opened before FlashPatch was on."""

from __future__ import annotations

import weakref
from typing import Any

from flashpatch import api, engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import instances
from flashpatch.patches.fp8.vllm.scheduler_gate import MARK, STEP

patches = Patches("fp8", "vllm>=0.24", scope="driver", remove_when="the scheduler gate is removed.")


@patches.wrap(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    relies_on=("self.request_states.get", "req_state.queue.put"),
    when="anywhere=fp8.vllm.worker_execute_model",
    why="vLLM returns a request that ended in an error as an empty completion.",
)
def process_outputs(original, self, engine_core_outputs, *args: Any, **kwargs: Any):
    """Raise the gate's reason for requests that the gate ended.

    An asynchronous client receives the error in the request's own queue; a synchronous one from ``step``."""
    refused = [o for o in engine_core_outputs if str(o.stop_reason or "").startswith(MARK)]
    if not refused:
        return original(self, engine_core_outputs, *args, **kwargs)
    states = [self.request_states.get(output.request_id) for output in refused]
    queues = [state.queue for state in states if state is not None and state.queue is not None]
    error = PatchError(refused[0].stop_reason.removeprefix(MARK).strip(), patch=STEP)
    for queue in queues:
        queue.put(error)
    result = original(self, engine_core_outputs, *args, **kwargs)
    if len(queues) < sum(state is not None for state in states):
        raise error
    return result


@patches.wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.step",
    relies_on=(
        "self.output_processor.process_outputs",
        "vllm.v1.engine.llm_engine:LLMEngine.abort_request",
        "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests",
    ),
    evidence="fault",
    why="An exception out of step leaves the client's other requests in the engine; a later call gets them.",
)
def llm_engine_step(original, self):
    """Abort the client's other requests before the refusal is raised, and first step on with clients of other engines
    that share experts."""
    try:
        return original(self)
    except PatchError:
        self.abort_request(list(self.output_processor.request_states), internal=True)
        # other clients ask each other before each step; one that left would leave them waiting
        while getattr(self, "dp_group", None) is not None and self.has_unfinished_requests():
            original(self)
        raise


_late: weakref.WeakSet[Any] = weakref.WeakSet()
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose model refuses weights while they are late
_lost: weakref.WeakSet[Any] = weakref.WeakSet()
_configs: list[weakref.ref[Any]] = []  # of engines that are opened while FlashPatch is on

#: Methods of vLLM's workers that write no weight, by which an engine may be asked nevertheless.
_WRITES_NOTHING = frozenset(
    "check_health compute_weight_checksums get_model_inspection get_supported_tasks list_loras profile reset_encoder_cache "
    "reset_mm_cache save_sharded_state save_tensorized_model sleep synchronize_device wake_up".split()
) | {api.CHECKSUM}


def opened_with(config: Any) -> None:
    """Note the configuration of an engine that is being opened while FlashPatch is on."""
    _configs[:] = [known for known in _configs if known() is not None]
    _configs.append(weakref.ref(config))


def lost(core: Any) -> None:
    """Note that an engine core of this process has lost its gate: FlashPatch was switched off."""
    _lost.add(core)


def find_late() -> str | None:
    """Find the engines of this process that were opened without FlashPatch; return a sentence if there are any."""
    known = {id(known()) for known in _configs}
    _late.clear()
    for one in instances.of_modules(instances.VLLM):
        core = getattr(one.engine_core, "engine_core", None)  # if it is in this process
        worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
        model = None if worker is None else worker.model_runner.get_model()
        shut_down = worker is not None and model is None
        if (id(one.vllm_config) not in known or core in _lost) and not shut_down:
            _late.add(one)
            _guard(one, model)
    if not _late:
        return None
    return f"{len(_late)} vLLM engine(s) exist already and take no weight updates; build them after enabling."


def _guard(late: Any, model: Any) -> None:
    """Let the model of an engine that was opened before refuse weights by itself; None if it is in another process."""
    if model is None or late in _guarded:
        return
    _guarded.add(late)
    client, original = weakref.ref(late), model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        if client() in _late and engine.enabled("fp8"):
            check_late("model.load_weights")
        return original(*args, **kwargs)

    model.load_weights = load_weights


def check_late(method: Any) -> None:
    """Check that a call to the workers of an engine without a gate writes no weights.

    Raises:
        PatchError: it may write some."""
    if isinstance(method, str) and method in _WRITES_NOTHING:
        return
    name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
    raise PatchError(
        f"this engine was opened before fp8, int8 or bf16 was enabled, or these were switched off since, so nobody would "
        f"follow the weights that {name} may write",
        patch=_late_calls.of(llm_engine_collective_rpc).id,
        advice="Open the engine after flashpatch.enable(); to update it as stock vLLM does, call flashpatch.disable().",
    )


_late_calls = Patches(
    "fp8",
    "vllm>=0.24",
    scope="driver",
    evidence="fault",
    why="An engine that was opened before FlashPatch was on updates as stock does: old prefix cache, no version, no word of it.",
    remove_when="never: such an engine cannot be followed.",
)


@_late_calls.wrap("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", id="fp8.vllm.async_llm_collective_rpc")
@_late_calls.wrap("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc")
def llm_engine_collective_rpc(original, self, method: Any, *args: Any, **kwargs: Any):
    """Refuse calls to engines that were opened before, if they may write weights."""
    if self in _late:
        check_late(method)
    return original(self, method, *args, **kwargs)
