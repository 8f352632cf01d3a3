"""State begin and end of an update around the functions with which ms-swift, checkpoint-engine and OpenRLHF send a policy.

docs/reference/doors.md has the table of all trainers: those of the others are where their other patches are."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.fp8 import model_registry, stated

_SWIFT = "swift.pipelines.infer.rollout:WeightSyncWorkerExtension"
_COLOCATED = "swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin._move_full_model_to_vllm"
_OPENRLHF = "openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap"
_CHECKPOINT_ENGINE = "checkpoint_engine.worker:VllmColocateWorkerExtension.update_weights_from_ipc"
_LOADS = "self.model_runner.model.load_weights"
_MS_SWIFT, _OPEN_RLHF = "ms-swift", "OpenRLHF"  # senders, in words that all functions of one say
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
def finish_vllm_weight_reload(original, vllm_model: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask for the strict form, which ms-swift has and its worker does not use; end no update of another sender."""
    managed = model_registry.get(vllm_model)
    if managed is not None and managed.state == "open":
        stated.finish([managed], _MS_SWIFT)
    return original(vllm_model, *args, **{**kwargs, "strict": True})


@swift.wrap(f"{_SWIFT}.update_flattened_params", relies_on=_LOADS, id="fp8.swift.update_flattened_params")
@swift.wrap(f"{_SWIFT}.update_named_param", relies_on=_LOADS)
def update_named_param(original, self, *args: Any, **kwargs: Any) -> Any:
    """Take a call as a part of an update, which ms-swift ends with vLLM's post-processing."""
    with stated.part(_models(self), _MS_SWIFT):
        return original(self, *args, **kwargs)


@swift.wrap(
    _COLOCATED,
    relies_on=("self.vllm_mode", "self.engine.inner_model", "finish_vllm_weight_reload"),
    scope="trainer",
)
def move_full_model_to_vllm(original, self) -> Any:
    """Make one update of what a colocated engine is sent."""
    managed = model_registry.get(self.engine.inner_model) if self.vllm_mode == "colocate" else None
    with stated.update([] if managed is None else [managed], _MS_SWIFT):
        return original(self)


@swift.wrap(
    f"{_SWIFT}.update_weights_from_ipc",
    relies_on=(_LOADS, "is_lora_sync"),
    params=("peft_config", "base_sync_done"),
)
def update_weights_from_ipc(original, self, *args: Any, **kwargs: Any) -> Any:
    """Make one update of what a call brings, unless that is an adapter."""
    adapter = kwargs.get("peft_config") and kwargs.get("base_sync_done")
    with stated.update([] if adapter else _models(self), _MS_SWIFT):
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
    with stated.part(_models(self), _OPEN_RLHF, last is True, kwargs.get("name", args[0] if args else "")):
        return original(self, *args, **kwargs)
