"""Record the models of SGLang 0.5.12 when they are constructed, and end their first load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import initialize_model
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang
from flashpatch.record import Contract

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter

LOADER = initialize_model.LOADER


def on_initialize(original, model_config: Any, load_config: Any, *args: Any, **kwargs: Any):
    """Around ``_initialize_model``: the model exists, nothing is loaded."""
    engine.require("fp8")
    model = original(model_config, load_config, *args, **kwargs)
    initialize_model.manage(model, model_config, load_config, PATCH.id, adapter)
    return model


def adapter(model: Any, model_config: Any) -> LoaderAdapter:
    """Make the `LoaderAdapter` of a model that was just constructed."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_world_size
    from sglang.srt.server_args import get_global_server_args

    from flashpatch.patches.fp8.sglang import loader_adapter

    ranks = get_tensor_model_parallel_world_size()
    return loader_adapter.make(
        model, model_config, get_global_server_args().device, ranks, lambda: vars(get_global_server_args())
    )


def on_load_model(original, self, *args: Any, **kwargs: Any):
    """Around ``ModelRunner.load_model``: the first load, by whichever loader, ends here."""
    ledger.role("worker", rank=self.tp_rank)
    result = original(self, *args, **kwargs)
    initialize_model.end_first_load(self, LOADED.id)
    return result


def _undo(site: Site) -> None:
    model_registry.restore_load_weights()
    site.unwrap()


PATCH = for_old_sglang(
    id=f"{FRAMEWORK}.initialize_model",
    targets=(f"{LOADER}:_initialize_model",),
    wrapper=on_initialize,
    undo=_undo,
    contract=Contract(
        params=("model_config", "load_config", "quant_config"),
        exists=(
            f"{LOADER}:device_loading_context",
            "sglang.srt.distributed.parallel_state:get_tensor_model_parallel_world_size",
            "sglang.srt.distributed.parallel_state:get_tp_group",
            "sglang.srt.layers.radix_attention:RadixAttention",
            "sglang.srt.lora.layers:BaseLayerWithLoRA",
            "sglang.srt.model_loader.utils:set_default_torch_dtype",
            "sglang.srt.server_args:get_global_server_args",
        ),
    ),
    evidence="install",
    scope=frozenset({"worker"}),
    needs=(f"{FRAMEWORK}.load_weights_and_postprocess",),
    why=initialize_model.PATCH.why,
    how=initialize_model.PATCH.how,
    upstream=initialize_model.PATCH.upstream,
)

LOADED = for_old_sglang(
    id=f"{FRAMEWORK}.load_model",
    targets=("sglang.srt.model_executor.model_runner:ModelRunner.load_model",),
    wrapper=on_load_model,
    contract=Contract(
        mentions=("self.model", "self.is_draft_worker", "self.model_config", "self.tp_rank"),
        exists=initialize_model.LOADED.contract.exists,
    ),
    evidence="install",
    scope=frozenset({"worker"}),
    why=initialize_model.LOADED.why,
    how=initialize_model.LOADED.how,
)
