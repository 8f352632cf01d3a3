"""Record SGLang's models when they are constructed (FlashRL's Record1), and end their first load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import engine_args
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter

logger = logging.getLogger("flashpatch.fp8")

LOADER = "sglang.srt.model_loader.loader"
NATIVE = "SGLang's load_format=flash_rl"


def on_initialize(original, model_config: Any, load_config: Any, *args: Any, **kwargs: Any):
    """Around ``_initialize_model``: the model exists, nothing is loaded."""
    from flashpatch.patches.fp8.sglang import loader_adapter

    engine.require("fp8")
    model = original(model_config, load_config, *args, **kwargs)
    manage(model, model_config, load_config, PATCH.id, loader_adapter.for_model)
    return model


def manage(
    model: Any,
    model_config: Any,
    load_config: Any,
    patch: str,
    adapter_for: Callable[[Any, Any], LoaderAdapter],
) -> None:
    """Follow a model that was just constructed, unless SGLang's own loader for changing weights has it.

    Args:
        model: nothing is loaded.
        model_config, load_config: SGLang's, of this model.
        patch: id of the patch that stands aside then.
        adapter_for: makes the adapter from model and configuration.
    """
    from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

    if _uses_native_loader(load_config):
        logger.warning("updates of %s are left to %s", type(model).__name__, NATIVE)
        ledger.note(superseded={patch: NATIVE})
    elif hasattr(model, "load_weights"):
        rounding = Rounding(model) if model_config.quantization == engine_args.INT8 else None
        adapter = adapter_for(model, model_config)
        model_registry.add(model, ManagedModel(model, adapter, engine.options("fp8"), rounding))


def on_load_model(original, self, *args: Any, **kwargs: Any):
    """Around ``ModelRunner.load_model``: the first load, by whichever loader, ends here."""
    from sglang.srt.runtime_context import get_parallel

    ledger.role("worker", rank=get_parallel().tp_rank)
    result = original(self, *args, **kwargs)
    end_first_load(self, LOADED.id)
    return result


def end_first_load(runner: Any, patch: str) -> None:
    """End the first load of a model runner's model, and check that the policy is quantized as asked for.

    Raises:
        PatchError: see `check_quantized`; it names ``patch``.
    """
    model_registry.end_first_loads()
    model = runner.model
    if model_registry.get(model) is not None and not runner.is_draft_worker:
        check_quantized(model, runner.model_config.quantization, patch)
        ledger.note(quantization=runner.model_config.quantization)


def check_quantized(model: Any, quantization: str | None, patch: str) -> None:
    """Refuse an engine whose quantization left every linear layer as it was.

    Raises:
        PatchError: a quantization is set and not one linear layer follows it.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    linear = [m for m in model.modules() if isinstance(m, LinearBase)] if quantization else []
    if linear and all(isinstance(m.quant_method, UnquantizedLinearMethod) for m in linear):
        raise PatchError(
            f"quantization={quantization!r} leaves all {len(linear)} linear layers of "
            f"{type(model).__name__} unquantized",
            patch=patch,
            advice="Choose another quantization.",
        )


def _uses_native_loader(load_config: Any) -> bool:
    """Whether the engine uses SGLang's own loader for changing weights."""
    form = load_config.load_format
    return getattr(form, "value", form) == "flash_rl"


def _undo(site: Site) -> None:
    model_registry.restore_load_weights()
    site.unwrap()


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    evidence="install",
    scope=frozenset({"worker"}),
    remove_when="SGLang's flash_rl covers every model, int8, and buckets that cut a fused layer.",
)

PATCH = _patch(
    id="fp8.sglang.initialize_model",
    targets=(f"{LOADER}:_initialize_model",),
    wrapper=on_initialize,
    undo=_undo,
    contract=Contract(
        params=("model_config", "load_config", "quant_config"),
        exists=(
            f"{LOADER}:device_loading_context",
            "sglang.srt.distributed.parallel_state:get_tp_group",
            "sglang.srt.layers.radix_attention:RadixAttention",
            "sglang.srt.lora.layers:BaseLayerWithLoRA",
            "sglang.srt.model_loader.utils:set_default_torch_dtype",
            "sglang.srt.runtime_context:get_device",
            "sglang.srt.runtime_context:get_exec",
            "sglang.srt.runtime_context:get_lora",
            "sglang.srt.runtime_context:get_parallel",
        ),
    ),
    needs=("fp8.sglang.postprocess_weights",),
    why="After post-processing, SGLang's parameters have lost their loaders and shapes: an update raises in the "
    "scheduler, which ends the engine.",
    how="Records every parameter and buffer, and the Python state around it, as the constructor made it, and "
    "routes the model's load_weights through an update. Stands aside for load_format=flash_rl.",
    upstream="QuantizedRLModelLoader (load_format=flash_rl): fp8 on Qwen2 and Qwen3, whole fused layers only.",
)

LOADED = _patch(
    id="fp8.sglang.load_model",
    targets=("sglang.srt.model_executor.model_runner:ModelRunner.load_model",),
    wrapper=on_load_model,
    contract=Contract(
        mentions=("self.model", "self.is_draft_worker", "self.model_config"),
        exists=(
            "sglang.srt.layers.linear:LinearBase",
            "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
        ),
    ),
    why="A process must be known as a worker, with its rank, for its absence to be noticed.",
    how="Writes role and rank to the ledger, ends the first load, checks that layers are quantized.",
)
