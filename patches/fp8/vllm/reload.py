"""The ways an update begins and ends: vLLM's reload functions and its post-processing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.vllm import engine_args
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
UTILS = "vllm.model_executor.model_loader.utils"


def on_begin(original, model: torch.nn.Module):
    """Instead of vLLM's own layerwise reload, open our update. Called within a load, it is already open."""
    owner = model_registry.get(model)
    if owner is None:
        return original(model)
    if not owner.inside_load:
        owner.begin()
    return None


def on_end(original, model: torch.nn.Module, *args: Any, **kwargs: Any):
    """Commit; called within a load (torchao's decorator does), the sender will finish later."""
    owner = model_registry.get(model)
    if owner is None:
        return original(model, *args, **kwargs)
    if not owner.inside_load:
        _finish(owner)
    return None


def on_process(original, model: torch.nn.Module, model_config: Any, target_device: torch.device):
    """Around ``process_weights_after_loading``: the end of the first load, or of an update."""
    from flashpatch.patches.fp8.precision import quantize_on_load

    owner = model_registry.get(model)
    if owner is None or owner.state == "loading":
        result = original(model, model_config, target_device)
        if owner is not None:
            owner.end_first_load()
            engine_args.check_quantized(model, model_config)
            ledger.note(kernels=quantize_on_load.kernels(model))
        return result
    _finish(owner)
    return None


def _finish(owner: model_registry.ManagedModel) -> None:
    try:
        owner.finish()
    finally:
        ledger.note(policy_version=owner.version, updates=owner.version, policy_state=owner.state)


_TEXT = dict(
    requires="vllm>=0.28",
    evidence="update",
    scope=frozenset({"worker"}),
    tested=("0.31.0", "0.32.0"),
    remove_when="vLLM's own reload is exact for tied, MoE and int8 models and for buckets that cut a fused layer.",
)

BEGIN = Patch(
    id="fp8.vllm.initialize_layerwise_reload",
    targets=(f"{RELOAD}:initialize_layerwise_reload",),
    wrapper=on_begin,
    contract=Contract(params=("model",)),
    why="vLLM's layerwise reload skips tied and MoE layers and frees memory that int8 handles point into.",
    how="reload_weights and the weight-transfer session open our transaction instead.",
    needs=("fp8.vllm.initialize_model",),
    **{**_TEXT, "evidence": "fault"},
)

END = Patch(
    id="fp8.vllm.finalize_layerwise_reload",
    targets=(f"{RELOAD}:finalize_layerwise_reload",),
    wrapper=on_end,
    contract=Contract(exists=(f"{RELOAD}:finalize_layerwise_processing",)),
    why="The end of reload_weights or of a weight-transfer session is where an update must be complete.",
    how="Commits the transaction, or raises with the names of what did not come.",
    needs=("fp8.vllm.initialize_layerwise_reload",),
    **{**_TEXT, "evidence": "fault"},
)

FINISH = Patch(
    id="fp8.vllm.process_weights_after_loading",
    targets=(f"{UTILS}:process_weights_after_loading",),
    wrapper=on_process,
    contract=Contract(params=("model", "model_config", "target_device"), mentions=("quant_method",)),
    why="Frameworks that stream buckets into load_weights call this once at the end; run twice on processed "
    "weights it corrupts them.",
    how="The first call ends the first load; later ones commit the open update and never process twice.",
    needs=("fp8.vllm.initialize_model",),
    **{**_TEXT, "evidence": "install"},
)
