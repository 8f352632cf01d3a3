"""Record vLLM's models when they are constructed (FlashRL's Record1)."""

from __future__ import annotations

import re
import threading
from typing import Any

from flashpatch import engine
from flashpatch.arming.site import Site
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.record import Contract, Patch

MODULE = "vllm.model_executor.model_loader.utils"
_NO_EXPERTS = re.compile(r"\b(int8|fp8) (fused )?moe\b", re.IGNORECASE)  # in vLLM's errors


_under_construction = threading.local()


def on_initialize(original, vllm_config: Any, *, model_config: Any = None, **kwargs: Any):
    """Around ``initialize_model``: the model exists, nothing is loaded.

    A multimodal model constructs its language model by the same function; it is a part of the whole.
    """
    if getattr(_under_construction, "outer", False):
        return original(vllm_config, model_config=model_config, **kwargs)
    _under_construction.outer = True
    try:
        return _construct(original, vllm_config, model_config=model_config, **kwargs)
    finally:
        _under_construction.outer = False


def _construct(original, vllm_config: Any, *, model_config: Any, **kwargs: Any):
    from flashpatch.patches.fp8.precision import quantize_on_load
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel
    from flashpatch.patches.fp8.vllm import amx_mla, int8_config, loader_adapter

    engine.require("fp8")
    marked = int8_config.read_mark(model_config or vllm_config.model_config)
    try:
        model = original(vllm_config, model_config=model_config, **kwargs)
    except (NotImplementedError, ValueError) as error:
        missing = _NO_EXPERTS.search(str(error))
        if missing is None:
            raise
        raise _no_experts(missing[1].lower(), str(error)) from error
    _refuse_experts(model)
    if hasattr(model, "load_weights"):
        amx_mla.refuse(model, PATCH.id)
        adapter = loader_adapter.for_model(vllm_config, model_config or vllm_config.model_config)
        rounding = quantize_on_load.for_model(model, marked) if marked is not None else None
        model_registry.add(model, ManagedModel(model, adapter, engine.options("fp8"), rounding))
    return model


def _refuse_experts(model: Any) -> None:
    """Refuse fp8 experts without a kernel: except on CUDA and ROCm vLLM notices once they have been loaded.

    Raises:
        PatchError: vLLM has chosen no kernel for a layer of experts.
    """
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "fp8_backend", None)
        if getattr(backend, "value", None) == "NONE":
            raise _no_experts("fp8", f"{name} has none")


def _no_experts(form: str, reason: str) -> PatchError:
    return PatchError(
        f"vLLM has no kernel here for experts in {form}: {reason}",
        patch=PATCH.id,
        advice="Use bf16 for this model; on x86 vLLM's kernels for experts in 8 bits need a CPU with AMX.",
    )


def _undo(site: Site) -> None:
    model_registry.restore_load_weights()
    site.unwrap()


PATCH = Patch(
    id="fp8.vllm.initialize_model",
    targets=(f"{MODULE}:initialize_model",),
    requires="vllm>=0.24",
    wrapper=on_initialize,
    undo=_undo,
    contract=Contract(
        params=("vllm_config", "prefix", "model_class", "model_config"),
        exists=(
            "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading",
            "vllm.utils.torch_utils:set_default_torch_dtype",
            "vllm.config:set_current_vllm_config",
            "vllm.distributed.parallel_state:get_tp_group",
            "vllm.model_executor.parameter:ChannelQuantScaleParameter",
            "vllm.model_executor.parameter:PerTensorScaleParameter",
        ),
        since={"0.28": ("vllm.model_executor.layers.attention:is_deferred_attention_layer",)},
    ),
    evidence="install",
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.process_weights_after_loading",),
    why="After post-processing, vLLM's parameters have lost their loaders, shapes and names: a second load "
    "fails or writes into the wrong layout.",
    how="Records every parameter and buffer, and the Python state around it, as the constructor made it, and "
    "routes the model's load_weights through an update; if the precision needs it, rounds bf16 values "
    "before the loaders of 8-bit parameters.",
    upstream="vllm/model_executor/model_loader/reload records metadata too, but not state outside parameters.",
    remove_when="vLLM's own reload is exact for tied, MoE and int8 models and for buckets that cut a fused layer.",
)
