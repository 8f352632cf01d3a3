"""Which function of a trainer sends a whole policy, and so where its update begins and ends.

A row whose function names begin and end through vLLM or SGLang itself has nothing to bracket. All others have a patch, with
a contract on the function, here or where the trainer's other patches are."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashpatch.decorate import Patches
from flashpatch.patches.fp8 import model_registry, stated


class Sender(NamedTuple):
    """One way in which a trainer sends.

    Attributes:
        trainer: which, and its way.
        function: the trainer's own.
        bracket: what is one update: ``call``; ``calls``, from the first to the one that says that it is the last; ``until end``,
            from the first to vLLM's post-processing; empty: the trainer says so to the engine by itself, see ``by``.
        by: id of the patch that states it, or the engine's functions that name begin and end."""

    trainer: str
    function: str
    bracket: str
    by: str


_SWIFT = "swift.pipelines.infer.rollout:WeightSyncWorkerExtension"
_COLOCATED = "swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin._move_full_model_to_vllm"
_OPENRLHF = "openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap"
_CHECKPOINT_ENGINE = "checkpoint_engine.worker:VllmColocateWorkerExtension.update_weights_from_ipc"
_VERL = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc"
_VERL_SGLANG = "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter.update_weights"
_PRIME_RL = "prime_rl.inference.vllm.worker.filesystem:FileSystemWeightUpdateWorker.update_weights_from_path"

SENDERS = (
    Sender("verl, vLLM", _VERL, "call", "fp8.verl_vllm.update_weights_from_ipc"),
    Sender("verl, SGLang", _VERL_SGLANG, "", "begin_weight_update, end_weight_update"),
    Sender(
        "TRL, colocated",
        "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
        "call",
        "fp8.trl.sync_weights",
    ),
    Sender(
        "TRL, server",
        "trl.generation.vllm_client:VLLMClient.update_named_params",
        "",
        "start_weight_update, finish_weight_update",
    ),
    Sender("ms-swift, colocated", _COLOCATED, "call", "fp8.swift.move_full_model_to_vllm"),
    Sender(
        "ms-swift, shared memory",
        f"{_SWIFT}.update_weights_from_ipc",
        "call",
        "fp8.swift.update_weights_from_ipc",
    ),
    Sender(
        "ms-swift, broadcast",
        f"{_SWIFT}.update_flattened_params",
        "until end",
        "fp8.swift.update_flattened_params",
    ),
    Sender(
        "ms-swift, single tensors",
        f"{_SWIFT}.update_named_param",
        "until end",
        "fp8.swift.update_named_param",
    ),
    Sender("OpenRLHF", f"{_OPENRLHF}.update_weight", "calls", "fp8.openrlhf.update_weight"),
    Sender(
        "OpenRLHF, CUDA IPC",
        f"{_OPENRLHF}.update_weight_cuda_ipc",
        "calls",
        "fp8.openrlhf.update_weight_cuda_ipc",
    ),
    Sender("checkpoint-engine", _CHECKPOINT_ENGINE, "call", "fp8.checkpoint_engine.update_weights_from_ipc"),
    Sender("prime-rl", _PRIME_RL, "", "reload_weights"),
)

_LOADS = "self.model_runner.model.load_weights"
_WHY = "Tensors alone do not say which of them are one policy, when a sender starts again, or changes their order."
_REMOVE_WHEN = "it sends through vLLM's own sessions or reload_weights."

swift = Patches(
    "fp8",
    "ms-swift>=4.6",
    framework="swift",
    scope="worker",
    evidence="optional",
    needs="fp8.vllm.process_weights_after_loading",
    why=_WHY,
    remove_when=_REMOVE_WHEN,
)


def _models(worker: Any) -> list[model_registry.ManagedModel]:
    return model_registry.all_models(worker.model_runner)


@swift.wrap(
    "swift.rlhf_trainers.utils:finish_vllm_weight_reload",
    relies_on=("model_loader_utils", "process_weights_after_loading"),
    params=("vllm_model", "model_config", "target_device", "strict"),
    why="ms-swift ends a sync with vLLM's post-processing and drops whatever that raises: a sync that left weights out "
    "returns, and with atomic='model' the old policy goes on answering.",
    upstream="swift/rlhf_trainers/utils.py: finish_vllm_weight_reload(strict=False) passes over every exception.",
    remove_when="ms-swift's worker extension calls it with strict=True.",
)
def finish_vllm_weight_reload(original, *args: Any, **kwargs: Any) -> Any:
    """Ask for the strict form, which ms-swift has and its worker does not use."""
    return original(*args, **{**kwargs, "strict": True})


@swift.wrap(f"{_SWIFT}.update_flattened_params", relies_on=_LOADS, id="fp8.swift.update_flattened_params")
@swift.wrap(f"{_SWIFT}.update_named_param", relies_on=_LOADS)
def update_named_param(original, self, *args: Any, **kwargs: Any) -> Any:
    """Take a call as a part of an update, which ms-swift ends with vLLM's post-processing."""
    with stated.part(_models(self)):
        return original(self, *args, **kwargs)


@swift.wrap(
    _COLOCATED,
    relies_on=("self.vllm_mode", "self.engine.inner_model", "finish_vllm_weight_reload"),
    scope="trainer",
)
def move_full_model_to_vllm(original, self) -> Any:
    """Make one update of what a colocated engine is sent."""
    managed = model_registry.get(self.engine.inner_model) if self.vllm_mode == "colocate" else None
    with stated.update([] if managed is None else [managed]):
        return original(self)


@swift.wrap(
    f"{_SWIFT}.update_weights_from_ipc",
    relies_on=(_LOADS, "is_lora_sync"),
    params=("peft_config", "base_sync_done"),
)
def update_weights_from_ipc(original, self, *args: Any, **kwargs: Any) -> Any:
    """Make one update of what a call brings, unless that is an adapter."""
    adapter = kwargs.get("peft_config") and kwargs.get("base_sync_done")
    with stated.update([] if adapter else _models(self)):
        return original(self, *args, **kwargs)


checkpoint_engine = Patches(
    "fp8",
    "checkpoint-engine>=0.4",
    framework="checkpoint_engine",
    scope="worker",
    evidence="optional",
    needs="fp8.vllm.process_weights_after_loading",
    why=_WHY,
    remove_when=_REMOVE_WHEN,
)


@checkpoint_engine.wrap(
    _CHECKPOINT_ENGINE,
    relies_on=(_LOADS, "process_weights_after_loading"),
    params="zmq_handles",
    id="fp8.checkpoint_engine.update_weights_from_ipc",
)
def receive_checkpoint(original, self, *args: Any, **kwargs: Any) -> Any:
    """Make one update of what a call brings."""
    with stated.update(_models(self)):
        return original(self, *args, **kwargs)


openrlhf = Patches(
    "fp8",
    "openrlhf>=0.11",
    framework="openrlhf",
    scope="worker",
    evidence="optional",
    needs="fp8.vllm.initialize_model",
    why="OpenRLHF sends a parameter a call and says which is the last one by empty_cache: a sync that left one out returns.",
    remove_when=_REMOVE_WHEN,
)


@openrlhf.wrap(
    f"{_OPENRLHF}.update_weight_cuda_ipc",
    relies_on=_LOADS,
    params=("name", "empty_cache"),
    id="fp8.openrlhf.update_weight_cuda_ipc",
)
@openrlhf.wrap(f"{_OPENRLHF}.update_weight", relies_on=_LOADS, params=("name", "empty_cache"))
def update_weight(original, self, *args: Any, **kwargs: Any) -> Any:
    """Take a call as a part of an update, and end that with the call that says that it is the last."""
    last = kwargs.get("empty_cache", bool(args) and args[-1])
    with stated.part(_models(self), last is True, kwargs.get("name", args[0] if args else "")):
        return original(self, *args, **kwargs)
