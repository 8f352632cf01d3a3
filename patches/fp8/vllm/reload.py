"""Open and commit updates from vLLM's reload functions and its post-processing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry, stated
from flashpatch.patches.fp8.update import events
from flashpatch.patches.fp8.vllm import engine_args

if TYPE_CHECKING:
    import torch

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
WORKER = "vllm.v1.worker.gpu_worker:Worker"


patches = Patches(
    "fp8",
    "vllm>=0.24",
    scope="worker",
    remove_when="vLLM's own reload is exact for tied, MoE and int8 models and for buckets that cut a fused layer.",
)


@patches.wrap(
    f"{WORKER}.reload_weights",
    relies_on="self.model_runner.reload_weights",
    evidence="optional",
    why="Weights in the format of kernels are written into the live parameters, so a failure leaves two policies.",
)
def worker_reload_weights(original, self, *args: Any, **kwargs: Any):
    """Refuse weights in the format of kernels; give an update up that fails."""
    _refuse_kernel_format(self, worker_reload_weights, kwargs.get("is_checkpoint_format", args[2:3]))
    try:
        return original(self, *args, **kwargs)
    except BaseException as error:
        stated.abandon(model_registry.all_models(self.model_runner), f"{type(error).__name__}: {error}")
        raise


@patches.wrap(
    f"{WORKER}._start_weight_update",
    f"{WORKER}.start_weight_update",  # before it had a part of its own for both models
    relies_on="self._weight_update_active",
    evidence="optional",
    why="vLLM begins no session while one is open, and a sender that died leaves it open for ever. vLLM 0.24 copies what a "
    "session in the format of kernels brings, or sparse patches, into the live parameters.",
)
def worker_start_weight_update(original, self, *args: Any, **kwargs: Any):
    """Give up a session that was left open. Refuse one in the format of kernels, which vLLM 0.24 alone opens."""
    _refuse_kernel_format(self, worker_start_weight_update, kwargs.get("is_checkpoint_format", args[:1]))
    if self._weight_update_active:
        _give_up(self, "another session begins")
    return original(self, *args, **kwargs)


@patches.wrap(
    f"{WORKER}.update_weights",
    relies_on="self._weight_update_active",
    id="fp8.vllm.worker_update_weights",
    evidence="optional",
    why="An error of the transfer closes vLLM's session and leaves the update open.",
)
@patches.wrap(
    f"{WORKER}.finish_weight_update",
    relies_on="self._weight_update_active",
    evidence="optional",
    why="An update that is not whole raises at its end, after which vLLM's session would stay open for ever.",
)
def worker_finish_weight_update(original, self, *args: Any, **kwargs: Any):
    """After an error give up the update and close the session, so that the sender can begin the next one."""
    is_open = self._weight_update_active
    try:
        return original(self, *args, **kwargs)
    except BaseException as error:
        if is_open:
            _give_up(self, f"{type(error).__name__}: {error}")
        raise


def _give_up(worker: Any, why: str) -> None:
    """Close vLLM's session, and give up what it has brought; sessions of models that are not followed stay as they are."""
    models = model_registry.all_models(worker.model_runner)
    if not models:
        return
    stated.abandon(models, why)
    worker._weight_update_active = False
    if hasattr(worker.weight_transfer_engine, "reset_weight_update_target"):
        worker.weight_transfer_engine.reset_weight_update_target()  # from a drafter
    else:
        worker._is_checkpoint_format = True


def _refuse_kernel_format(worker: Any, function: Callable[..., Any], is_checkpoint_format: Any) -> None:
    """Raise if ``is_checkpoint_format``, as a keyword or the tuple of a positional argument, says False."""
    if is_checkpoint_format in (False, (False,)) and model_registry.all_models(worker.model_runner):
        raise PatchError(
            f"{function.__name__.removeprefix('worker_')}(is_checkpoint_format=False) copies into the parameters in use, past "
            "load_weights",
            patch=patches.of(function).id,
            advice="Send weights in the checkpoint's format.",
        )


@patches.wrap(
    f"{RELOAD}:initialize_layerwise_reload",
    evidence="optional",
    when="called=fp8.vllm.finalize_layerwise_reload",
    why="vLLM's layerwise reload skips tied and MoE layers and frees memory that int8 handles point into.",
)
def initialize_layerwise_reload(original, model: torch.nn.Module):
    """Open an update in place of vLLM's own reload, unless a load has opened one."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model)
    if not managed.inside_load:
        managed.begin()
    return None


@patches.wrap(
    f"{RELOAD}:finalize_layerwise_reload",
    relies_on=f"{RELOAD}:finalize_layerwise_processing",
    params=(),
    evidence="update",
    when="called=fp8.vllm.initialize_layerwise_reload",
    why="The end of reload_weights or of a weight-transfer session is where an update must be complete.",
)
def finalize_layerwise_reload(original, model: torch.nn.Module, *args: Any, **kwargs: Any):
    """Commit the update, or raise with the names of what did not come; within a load (torchao's decorator) do nothing."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, *args, **kwargs)
    if not managed.inside_load:
        finish(managed)
    return None


@patches.wrap(
    "vllm.model_executor.model_loader.utils:process_weights_after_loading",
    relies_on="quant_method",
    evidence="install",
    why="Frameworks that stream buckets into load_weights call this once at the end; run twice on processed "
    "weights it corrupts them.",
)
def process_weights_after_loading(
    original, model: torch.nn.Module, model_config: Any, target_device: torch.device
):
    """End the first load at the first call; commit the open update at later ones, and never process twice."""
    from flashpatch.patches.fp8.precision import quantize_on_load

    managed = model_registry.get(model)
    if managed is None or managed.state == "loading":
        result = original(model, model_config, target_device)
        if managed is not None:
            managed.end_first_load()
            engine_args.check_quantized(model, model_config)
            ledger.note(kernels=quantize_on_load.kernels(model))
        return result
    finish(managed)
    return None


def finish(managed: model_registry.ManagedModel) -> None:
    """Commit the open update, and note what became of it. Raises PatchError, which names what is missing."""
    try:
        managed.finish()
    finally:
        events.note(managed)
