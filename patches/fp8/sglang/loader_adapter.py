"""Adapt SGLang's model loader to the update: how it post-processes a module, which engines cannot be updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from flashpatch import engine
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.sglang import schedulers
from flashpatch.patches.fp8.update.model import LoaderAdapter
from flashpatch.patches.fp8.update.ranks import Consensus, RankConsensus, SingleRank


class SglangAdapter(LoaderAdapter):
    """The `LoaderAdapter` of a model that SGLang has just constructed.

    Args:
        model: nothing is loaded yet.
        model_config: ``sglang.srt.configs.model_config.ModelConfig`` of this model (a drafter has its own).
        device: of the engine.
        ranks: number of tensor-parallel ranks.
        settings: returns the engine's arguments named in `refusal`, which this generation of SGLang keeps in a place of its own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        device: str,
        ranks: int,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._model, self._dtype, self._ranks, self._settings = model, model_config.dtype, ranks, settings
        super().__init__(torch.device(device), "drafter" if model_config.is_draft_model else "target")

    def make_consensus(self, name: str) -> Consensus:
        from sglang.srt.distributed.parallel_state import get_tp_group

        return RankConsensus(get_tp_group().ranks, name=name) if self._ranks > 1 else SingleRank()

    def lenders(self) -> list[model_registry.ManagedModel]:
        return model_registry.targets() if self.role == "drafter" else []

    def process(self, module: torch.nn.Module) -> None:
        from sglang.srt.lora.layers import BaseLayerWithLoRA
        from sglang.srt.model_loader.loader import device_loading_context

        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(module, BaseLayerWithLoRA):
            with device_loading_context(module, self.device):
                method.process_weights_after_loading(module)

    def deferred(self, module: torch.nn.Module) -> bool:
        from sglang.srt.layers.radix_attention import RadixAttention

        return isinstance(module, RadixAttention)  # checkpoints leave its scales out

    @contextmanager
    def context(self) -> Iterator[None]:
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        with set_default_torch_dtype(self._dtype):
            yield

    def around(self) -> AbstractContextManager[None]:
        return unwrapped(self._model)

    def refusal(self) -> str | None:
        return refusal(self._model, self._settings())

    def busy(self) -> bool:
        return schedulers.busy()

    def compiled(self) -> bool:
        return self.device.type != "cpu"


def for_model(model: torch.nn.Module, model_config: Any) -> LoaderAdapter:
    """Make the adapter of a model from what this generation of SGLang keeps in its runtime context."""
    from sglang.srt.runtime_context import get_device, get_parallel

    return SglangAdapter(model, model_config, get_device().device, get_parallel().tp_size, _settings)


def _settings() -> dict[str, Any]:
    from sglang.srt.runtime_context import get_exec, get_lora, get_memory, get_parallel

    return dict(
        **{name: getattr(get_memory(), name, None) for name in KEEPS_KV},
        enable_lora=get_lora().enable_lora,
        enable_eplb=get_exec().moe.enable_eplb,
        cpu_offload_gb=get_exec().offload.cpu_offload_gb,
        offload_group_size=get_exec().offload.offload_group_size,
        pp_size=get_parallel().pp_size,
    )


#: Settings that keep KV beyond SGLang's ``flush_cache``: in stores that outlive it, or in a cache of somebody else's.
KEEPS_KV = (
    *("hicache_storage_backend", "enable_unified_cache_external_linker", "enable_lmcache", "enable_flexkv"),
    "radix_cache_backend",
)


def refusal(model: torch.nn.Module, settings: Mapping[str, Any]) -> str | None:
    """Return why weights of this model in this engine cannot be updated, or None."""
    if hasattr(model, "post_load_weights"):
        return f"{type(model).__name__} derives weights of its own while it loads (post_load_weights)"
    if settings["enable_lora"] and (other := _untested(model)):
        return f"LoRA adapters (enable_lora) were never run beside {other}"
    if settings["enable_eplb"]:
        return "expert rebalancing is enabled (enable_eplb)"
    if settings["cpu_offload_gb"]:
        return "weights are offloaded to the host (cpu_offload_gb)"
    if settings["offload_group_size"] > 0:
        return "weights are offloaded to the host and prefetched (offload_group_size)"
    if kept := next((name for name in KEEPS_KV if settings.get(name)), ""):
        return f"{kept}={settings[kept]!r} keeps KV where flush_cache does not empty it: KV of the old policy would come back"
    if settings["pp_size"] > 1:
        return "pipeline stages cannot agree on an update (pp_size)"
    mode = engine.options("fp8")["in_flight"]
    if mode != "refuse":
        return f"in_flight={mode!r} is not available on SGLang; pause_generation aborts or retracts requests there"
    return None


def _untested(model: torch.nn.Module) -> str:
    """Return what in the model was never updated beside adapters; empty if there is nothing."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    return "experts" if any(isinstance(module, FusedMoEWithLoRA) for module in model.modules()) else ""


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Update a model whose layers SGLang has wrapped for LoRA adapters: its loader knows them without.

    Within, layers stand in the model as they did before they were wrapped; afterwards wrappers have their new parameters.

    A wrapper has the layer's weight and bias as its own too. Of an embedding that is the head as well SGLang makes two
    layers with one weight."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA
    from sglang.srt.utils import replace_submodule

    wrapped = [(name, one) for name, one in model.named_modules() if isinstance(one, BaseLayerWithLoRA)]
    first: dict[int, torch.nn.Module] = {}  # id of a weight -> the layer that had it before another was made
    for _, one in wrapped:
        first.setdefault(id(getattr(one.base_layer, "weight", one)), one.base_layer)
    plain = [(name, first[id(getattr(one.base_layer, "weight", one))]) for name, one in wrapped]
    for name, layer in plain:
        replace_submodule(model, name, layer)
    try:
        yield
    finally:
        for (name, one), (_, layer) in zip(wrapped, plain, strict=True):
            replace_submodule(model, name, one)
            for own in ("weight", "bias"):
                if own in one._parameters:
                    one.base_layer._parameters[own] = one._parameters[own] = layer._parameters[own]
