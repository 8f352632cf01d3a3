"""Open and commit updates from vLLM's reload functions and its post-processing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry, update_events
from flashpatch.patches.fp8.vllm import engine_args
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
UTILS = "vllm.model_executor.model_loader.utils"


def on_reload(original, self, *args: Any, **kwargs: Any):
    """Around ``Worker.reload_weights``: refuse weights in the format of kernels."""
    _refuse_kernel_format(self, RELOAD_WEIGHTS, kwargs.get("is_checkpoint_format", args[2:3]))
    return original(self, *args, **kwargs)


def on_start(original, self, *args: Any, **kwargs: Any):
    """Around ``Worker.start_weight_update``: the same for a weight-transfer session, which vLLM 0.24 alone opens so."""
    _refuse_kernel_format(self, START, kwargs.get("is_checkpoint_format", args[:1]))
    return original(self, *args, **kwargs)


def _refuse_kernel_format(worker: Any, patch: Patch, is_checkpoint_format: Any) -> None:
    """Raise if ``is_checkpoint_format``, as a keyword or the tuple of a positional argument, says False."""
    if is_checkpoint_format in (False, (False,)) and model_registry.all_models(worker.model_runner):
        raise PatchError(
            f"{patch.targets[0].rpartition('.')[2]}(is_checkpoint_format=False) copies into the parameters in use, past "
            "load_weights",
            patch=patch.id,
            advice="Send weights in the checkpoint's format.",
        )


def on_begin(original, model: torch.nn.Module):
    """Around ``initialize_layerwise_reload``: open an update; within a load one is open."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model)
    if not managed.inside_load:
        managed.begin()
    return None


def on_end(original, model: torch.nn.Module, *args: Any, **kwargs: Any):
    """Around ``finalize_layerwise_reload``: commit; within a load (torchao's decorator) do nothing."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, *args, **kwargs)
    if not managed.inside_load:
        finish(managed)
    return None


def on_process(original, model: torch.nn.Module, model_config: Any, target_device: torch.device):
    """Around ``process_weights_after_loading``: the end of the first load, or of an update."""
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
    """Commit the open update, and note what became of it.

    Raises:
        PatchError: something is missing; it is named.
    """
    try:
        managed.finish()
    finally:
        update_events.note(managed)


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    scope=frozenset({"worker"}),
    remove_when="vLLM's own reload is exact for tied, MoE and int8 models and for buckets that cut a fused layer.",
)

RELOAD_WEIGHTS = _patch(
    id="fp8.vllm.worker_reload_weights",
    targets=("vllm.v1.worker.gpu_worker:Worker.reload_weights",),
    wrapper=on_reload,
    contract=Contract(mentions=("self.model_runner.reload_weights",)),
    why="Weights in the format of kernels are written into the live parameters, so a failure leaves two policies.",
    how="Refuses them; weights in the checkpoint's format go on.",
    needs=("fp8.vllm.initialize_model",),
    evidence="optional",
)

START = _patch(
    id="fp8.vllm.worker_start_weight_update",
    targets=("vllm.v1.worker.gpu_worker:Worker.start_weight_update",),
    wrapper=on_start,
    why="vLLM 0.24 copies the weights of a session in the format of kernels, or sparse patches, into the live parameters.",
    how="Refuses such a session; one in the checkpoint's format goes on.",
    needs=("fp8.vllm.initialize_model",),
    evidence="optional",
)

BEGIN = _patch(
    id="fp8.vllm.initialize_layerwise_reload",
    targets=(f"{RELOAD}:initialize_layerwise_reload",),
    wrapper=on_begin,
    contract=Contract(params=("model",)),
    why="vLLM's layerwise reload skips tied and MoE layers and frees memory that int8 handles point into.",
    how="reload_weights and the weight-transfer session open an update instead.",
    needs=("fp8.vllm.initialize_model",),
    evidence="optional",
    when="called=fp8.vllm.finalize_layerwise_reload",
)

END = _patch(
    id="fp8.vllm.finalize_layerwise_reload",
    targets=(f"{RELOAD}:finalize_layerwise_reload",),
    wrapper=on_end,
    contract=Contract(exists=(f"{RELOAD}:finalize_layerwise_processing",)),
    why="The end of reload_weights or of a weight-transfer session is where an update must be complete.",
    how="Commits the update, or raises with the names of what did not come.",
    needs=("fp8.vllm.initialize_layerwise_reload",),
    evidence="update",
    when="called=fp8.vllm.initialize_layerwise_reload",
)

FINISH = _patch(
    id="fp8.vllm.process_weights_after_loading",
    targets=(f"{UTILS}:process_weights_after_loading",),
    wrapper=on_process,
    contract=Contract(params=("model", "model_config", "target_device"), mentions=("quant_method",)),
    why="Frameworks that stream buckets into load_weights call this once at the end; run twice on processed "
    "weights it corrupts them.",
    how="The first call ends the first load; later ones commit the open update and never process twice.",
    needs=("fp8.vllm.initialize_model",),
    evidence="install",
)
