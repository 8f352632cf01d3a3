"""Adapt SGLang's model loader to the update: how it post-processes a module, which engines cannot be updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flashpatch import engine
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.rank_consensus import Consensus, RankConsensus, SingleRank
from flashpatch.patches.fp8.sglang import schedulers


def for_model(model: torch.nn.Module, model_config: Any) -> LoaderAdapter:
    """Make the `LoaderAdapter` of a model that SGLang has just constructed.

    Args:
        model: nothing is loaded yet.
        model_config: ``sglang.srt.configs.model_config.ModelConfig`` of this model (a drafter has its own).
    """
    from sglang.srt.runtime_context import get_device, get_parallel

    return make(model, model_config, get_device().device, get_parallel().tp_size, _settings)


def make(
    model: torch.nn.Module,
    model_config: Any,
    device: str,
    ranks: int,
    settings: Callable[[], Mapping[str, Any]],
) -> LoaderAdapter:
    """Make the adapter from what this generation of SGLang keeps elsewhere.

    Args:
        model, model_config: see `for_model`.
        device: of the engine.
        ranks: number of tensor-parallel ranks.
        settings: returns the engine's arguments named in `refusal`.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.lora.layers import BaseLayerWithLoRA
    from sglang.srt.model_loader.loader import device_loading_context
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    place = torch.device(device)

    def consensus(name: str) -> Consensus:
        return RankConsensus(get_tp_group().ranks, name=name) if ranks > 1 else SingleRank()

    def process(module: torch.nn.Module) -> None:
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(module, BaseLayerWithLoRA):
            with device_loading_context(module, place):
                method.process_weights_after_loading(module)

    @contextmanager
    def context():
        with set_default_torch_dtype(model_config.dtype):
            yield

    return LoaderAdapter(
        device=place,
        process=process,
        deferred=lambda module: isinstance(module, RadixAttention),  # checkpoints leave its scales out
        context=context,
        around=lambda: unwrapped(model),
        consensus=consensus("target"),
        another_consensus=consensus,
        refusal=lambda: refusal(model, settings()),
        busy=schedulers.busy,
        compiled=lambda: place.type != "cpu",
    )


def _settings() -> dict[str, Any]:
    from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

    return dict(
        enable_lora=get_lora().enable_lora,
        enable_eplb=get_exec().moe.enable_eplb,
        cpu_offload_gb=get_exec().offload.cpu_offload_gb,
        offload_group_size=get_exec().offload.offload_group_size,
        pp_size=get_parallel().pp_size,
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
    layers with one weight.
    """
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
