"""Adapt vLLM's model loader to the update: how it post-processes a module, which engines cannot be updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.update.model import LoaderAdapter
from flashpatch.patches.fp8.update.ranks import Consensus, RankConsensus, SingleRank
from flashpatch.patches.fp8.vllm import running_requests, unsupported


class VllmAdapter(LoaderAdapter):
    """The `LoaderAdapter` of a model that vLLM is constructing.

    Args:
        vllm_config: ``vllm.config.VllmConfig``.
        model_config: ``vllm.config.ModelConfig`` of this model (a drafter has its own)."""

    def __init__(self, vllm_config: Any, model_config: Any) -> None:
        self._config, self._model_config = vllm_config, model_config
        self._is_deferred = _deferred_layers()
        self._runner = model_registry.constructing_runner()
        device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
        super().__init__(device, "drafter" if is_drafter(vllm_config, model_config) else "target")
        if vllm_config.load_config.load_format == "dummy":
            self.stands_for = model_config.model

    def make_consensus(self, name: str) -> Consensus:
        return _consensus(self._config.parallel_config, name)

    def process(self, module: torch.nn.Module) -> None:
        if _is_quantized(module):
            module.quant_method.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()
        if self.deferred(module):
            module.process_weights_after_loading(self._model_config.dtype)

    def lenders(self) -> list[model_registry.ManagedModel]:
        return model_registry.targets() if self.role == "drafter" else []

    def deferred(self, module: torch.nn.Module) -> bool:
        return self._is_deferred(module)

    def processes(self, module: torch.nn.Module) -> bool:
        source = getattr(getattr(module, "quant_method", None), "requantization_source", None)
        if source is not None:  # from vLLM 0.33 on
            raise PatchError(
                f"vLLM quantizes its checkpoint anew, from {type(source).__name__}'s values, which only the first load releases",
                advice="Open a new engine on other weights.",
            )
        return _is_quantized(module) or self.deferred(module)

    def borrows(self, module: torch.nn.Module) -> bool:
        # A CPU kernel for wide weights packs them into memory of its own: vLLM frees a linear layer's weight itself.
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        method = getattr(module, "quant_method", None)
        return not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))

    @contextmanager
    def context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        before = torch.get_default_dtype()
        torch.set_default_dtype(self._model_config.dtype)
        try:
            with set_current_vllm_config(self._config):
                yield
        finally:
            torch.set_default_dtype(before)

    def refusal(self) -> str | None:
        return unsupported.at_update(self._config)

    def busy(self) -> bool:
        return running_requests.running(self._runner())

    def quantized_cache(self) -> bool:
        return str(self._config.cache_config.cache_dtype).startswith(("fp8", "int8", "nvfp4"))

    def kept(self, module: torch.nn.Module) -> set[str]:
        """Return those that vLLM's online quantization keeps."""
        from vllm.model_executor.model_loader.reload import layerwise

        if module not in layerwise.LAYERWISE_INFO:
            return set()
        return {name for name, _ in layerwise.LAYERWISE_INFO[module].loaded_weights}

    def captured(self) -> bool:
        return self._config.compilation_config.cudagraph_mode.has_full_cudagraphs()

    def compiled(self) -> bool:
        return not self._config.model_config.enforce_eager


def _is_quantized(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)


_DEFERRED = ("AttentionLayerBase", "Attention", "MLAAttention", "MMEncoderAttention")
"""Types of such layers; vLLM 0.27 names the first and the last, older ones the last three."""


def _deferred_layers() -> Callable[[torch.nn.Module], bool]:
    """Return the test for layers that vLLM post-processes after all others, with the type of activations."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:  # before vLLM 0.28, whose own loop over the layers names their types
        from vllm.model_executor.model_loader import utils

        kinds = tuple(getattr(utils, name) for name in _DEFERRED if hasattr(utils, name))
    else:
        return is_deferred_attention_layer

    def is_deferred(module: torch.nn.Module) -> bool:
        return isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")

    return is_deferred


def is_drafter(vllm_config: Any, model_config: Any) -> bool:
    """Whether ``model_config`` is of the model that speculates for the engine's target.

    Methods without a model, such as ``ngram``, give the target's own as the drafter's. A drafter of its own kind,
    ``draft_model``, is opened under a ``vllm_config`` whose ``model_config`` is the drafter's."""
    speculative = vllm_config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    return drafter is not None and model_config is drafter and drafter is not speculative.target_model_config


def _consensus(parallel_config: Any, role: str) -> Consensus:
    """Make the agreement of the ranks that hold a model; a drafter lives on the last pipeline stage alone."""
    if parallel_config.world_size == 1:
        return SingleRank()
    from vllm.distributed.parallel_state import get_tp_group

    together, rank = get_tp_group().ranks, torch.distributed.get_rank()
    first = rank - rank % parallel_config.world_size
    everyone = together if role == "drafter" else range(first, first + parallel_config.world_size)
    if len(everyone) == 1:
        return SingleRank()
    return RankConsensus(together, everyone, rank=rank, name=role, call=all_ranks.current_call)
