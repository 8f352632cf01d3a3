"""Name what an engine may be configured to do that a weight update cannot follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashpatch import engine

#: Backends of ``weight_transfer_config`` that load through the model's ``load_weights``, where an update is followed.
_LOAD = frozenset({"nccl", "ipc"})

#: What others are known to do instead.
_WRITES_LIVE = {
    "nccl_m2n": "reshards into the parameters in use",
    "sparse_nccl": "writes single values into the parameters in use",
    "sharded_rdt": "replays recorded copies into the parameters in use",
    "modelexpress": "receives into the parameters in use",
}


_HANDS_ON = (
    "hands KV on to other engines without saying of which policy it is, so a prefill of one version would be decoded under the "
    "next; update engines that prefill and decode themselves"
)
_KEEPS = "keeps KV in a store that outlives its reset, or is not this engine's alone, so KV of the old policy would come back"
_UNTRIED = "does not say what its reset empties, and was never run beside an update"

#: vLLM's KV connectors: why an engine that has one cannot be updated; empty if its reset empties all that it keeps.
CONNECTORS = {
    **dict.fromkeys("MultiConnector OffloadingConnector SimpleCPUOffloadConnector".split(), ""),
    **dict.fromkeys("NixlConnector NixlPullConnector NixlPushConnector MooncakeConnector".split(), _HANDS_ON),
    **dict.fromkeys("MoRIIOConnector P2pNcclConnector".split(), _HANDS_ON),
    **dict.fromkeys("ExampleConnector FlexKVConnectorV1 HF3FSKVConnector".split(), _KEEPS),
    **dict.fromkeys("LMCacheConnectorV1 LMCacheMPConnector MooncakeStoreConnector".split(), _KEEPS),
    **dict.fromkeys("DecodeBenchConnector ExampleHiddenStatesConnector HiSparseConnector".split(), _UNTRIED),
}

#: Places in which OffloadingConnector keeps KV that its reset empties; the second one but for its secondary tiers.
OFFLOADING = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def at_start(vllm_config: Any) -> str | None:
    """Return why an engine of this configuration must not be opened, or None: it would be written to unseen."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is not None and transfer.backend not in _LOAD:
        how = _WRITES_LIVE.get(transfer.backend, "is not known to load by load_weights alone")
        return (
            f"the weight transfer backend {transfer.backend!r} {how}, so nobody could tell a whole policy from a "
            "mixed one; use nccl or ipc, or load in a worker extension, by the model's load_weights"
        )
    if vllm_config.load_config.load_format == "ipc_cache":
        return (
            "load_format='ipc_cache' shares the memory of weights with other engines, which an update of this one "
            "would change; use another load format"
        )
    return None


def at_update(vllm_config: Any) -> str | None:
    """Return why an engine of this configuration cannot be updated, or None."""
    if problem := adapters(vllm_config):
        return problem
    if vllm_config.parallel_config.enable_eplb:
        return "expert rebalancing is enabled (enable_eplb)"
    if problem := spans_engines(vllm_config):
        return problem
    model = vllm_config.model_config
    if model.convert_type == "classify" and getattr(model.hf_text_config, "classifier_from_token", None):
        return "vLLM makes its classifier of the checkpoint's head (classifier_from_token); send one that has a classifier"
    kernel = getattr(vllm_config, "kernel_config", None)
    backend = str(getattr(kernel, "moe_backend", ""))
    if backend.startswith("flashinfer_moe_ep"):
        return (
            f"the MoE backend {backend!r} calls a collective while it processes loaded experts, which ranks reach at "
            "different times; use another moe_backend"
        )
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return (
            "an encoder cache is shared through a connector (ec_transfer_config), which would keep embeddings of the old "
            "policy; unset ec_transfer_config"
        )
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype).startswith("fp8"):
        return (
            "calculate_kv_scales computes the scales of the KV cache under the first policy, once; unset it"
        )
    if problem := _connector(getattr(vllm_config, "kv_transfer_config", None)):
        return problem
    offload = getattr(vllm_config, "offload_config", None)
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0):
        return "weights are offloaded to the host (cpu_offload_gb)"
    if getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "weights are offloaded to the host and prefetched (offload_group_size)"
    return None


def adapters(vllm_config: Any) -> str | None:
    """Return why an engine with LoRA adapters cannot be followed, or None."""
    lora = vllm_config.lora_config
    if lora is None:
        return None
    state = engine.statuses()["fp8.vllm_lora.add_adapter"].state
    if state.word not in ("installed", "live"):
        return f"LoRA adapters are enabled (enable_lora) and cannot be followed: fp8.vllm_lora.add_adapter is {state}"
    parallel = vllm_config.parallel_config
    untested = {
        "experts": vllm_config.model_config.is_moe,
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "fully_sharded_loras": lora.fully_sharded_loras,
        "speculation": vllm_config.speculative_config is not None,
    }
    found = [name for name, there in untested.items() if there]
    return f"LoRA adapters (enable_lora) were never run beside {', '.join(found)}" if found else None


def at_discard(vllm_config: Any, method: Any, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call of a worker's method, by name, with these arguments, that discards weights cannot be made on an
    engine of this configuration, or None."""
    level = args[0] if args else kwargs.get("level", 1)
    if method != "reset_weights" and not (method == "sleep" and level >= 2):
        return None
    return spans_engines(vllm_config)


def spans_engines(vllm_config: Any) -> str | None:
    """Return why a model shares its layers with other engines of its data-parallel group, or None."""
    size = vllm_config.parallel_config.data_parallel_size
    if size > 1 and vllm_config.model_config.is_moe:
        return (
            f"its experts span the {size} engines of a data-parallel group (data_parallel_size={size}), which would take a "
            "new policy at different steps; open engines of their own (data_parallel_size=1)"
        )
    return None


def _connector(transfer: Any) -> str | None:
    """Return why an engine with the KV connector of a ``KVTransferConfig``, or of one of its parts, cannot be updated, or None.

    What one from a module of its own keeps, its ``reset_cache`` says at the commit."""
    parts = transfer if isinstance(transfer, Mapping) else vars(transfer) if transfer is not None else {}
    name, extra = parts.get("kv_connector"), parts.get("kv_connector_extra_config") or {}
    if name is None or parts.get("kv_connector_module_path"):
        return None
    why = CONNECTORS.get(name, _UNTRIED)
    if name == "OffloadingConnector":
        spec = extra.get("spec_name", OFFLOADING[0])
        if extra.get("secondary_tiers"):
            name, why = "OffloadingConnector with secondary_tiers", _KEEPS
        elif spec not in OFFLOADING:
            name, why = f"OffloadingConnector with spec_name={spec!r}", _UNTRIED
    if why:
        return f"{name} (kv_transfer_config) {why}"
    return next(filter(None, map(_connector, extra.get("connectors", ()))), None)
