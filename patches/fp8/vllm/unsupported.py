"""Name what an engine may be configured to do that a weight update cannot follow."""

from __future__ import annotations

from typing import Any

#: Backends of ``weight_transfer_config`` that write into the engine's own tensors, past ``load_weights``.
_WRITES_LIVE = {
    "nccl_m2n": "reshards into the parameters in use",
    "sparse_nccl": "writes single values into the parameters in use",
    "sharded_rdt": "replays recorded copies into the parameters in use",
}


def at_start(vllm_config: Any) -> str | None:
    """Return why an engine of this configuration must not be opened, or None: it would be written to unseen."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    how = _WRITES_LIVE.get(getattr(transfer, "backend", ""))
    if how is not None:
        return (
            f"the weight transfer backend {transfer.backend!r} {how}, so nobody could tell a whole policy from a "
            "mixed one; use nccl or ipc"
        )
    if vllm_config.load_config.load_format == "ipc_cache":
        return (
            "load_format='ipc_cache' shares the memory of weights with other engines, which an update of this one "
            "would change; use another load format"
        )
    return None


def at_update(vllm_config: Any) -> str | None:
    """Return why an engine of this configuration cannot be updated, or None."""
    if vllm_config.lora_config is not None:
        return "LoRA adapters are enabled (enable_lora)"
    if vllm_config.parallel_config.enable_eplb:
        return "expert rebalancing is enabled (enable_eplb)"
    offload = getattr(vllm_config, "offload_config", None)
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0):
        return "weights are offloaded to the host (cpu_offload_gb)"
    if getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "weights are offloaded to the host and prefetched (offload_group_size)"
    return None
