"""The storage cases of SGLang: a model, how it is quantized, and what the engine is told."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One model to load and to update."""

    family: str  # of `vllm_lab.models.FAMILIES`
    method: str  # class of the quantization method that its layers must show
    scheme: str = ""  # how the checkpoint is quantized; "" for bf16
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of the engine
    config: dict[str, Any] = field(default_factory=dict)  # changes of the model's config
    capabilities: tuple[int, ...] = (90,)  # compute capabilities that the case runs on, times ten


def online(scheme: str, **more: Any) -> dict[str, Any]:
    return {"quantization": scheme, **more}


CAPABILITIES = (80, 90)
CASES: dict[str, Case] = {
    "bf16": Case("llama", "UnquantizedLinearMethod", capabilities=CAPABILITIES),
    "fp8": Case("llama", "Fp8LinearMethod", engine=online("fp8"), capabilities=CAPABILITIES),
    "w8a8_fp8": Case("llama", "W8A8Fp8LinearMethod", engine=online("w8a8_fp8")),
    "w8a8_fp8_checkpoint": Case("llama", "W8A8Fp8LinearMethod", "w8a8-fp8"),
    "w8a8_int8": Case("llama", "W8A8Int8LinearMethod", "w8a8-int8", capabilities=CAPABILITIES),
    "block": Case("llama", "Fp8LinearMethod", "block", capabilities=CAPABILITIES),
    "static_kv": Case(
        "llama", "Fp8LinearMethod", "static-kv", dict(kv_cache_dtype="fp8_e4m3"), capabilities=CAPABILITIES
    ),
    "ct_channel": Case("llama", "CompressedTensorsLinearMethod", "fp8-channel"),
    "w4a16": Case("llama", "CompressedTensorsLinearMethod", "w4a16", capabilities=CAPABILITIES),
    "moe_bf16": Case("qwen3-moe", "UnquantizedFusedMoEMethod"),
    "moe_fp8": Case("qwen3-moe", "Fp8MoEMethod", engine=online("fp8")),
    "moe_block": Case("qwen3-moe", "Fp8MoEMethod", "block"),
}


def of(capability: int) -> list[str]:
    """Return the names of the cases that a device of this capability has."""
    return [name for name, case in CASES.items() if capability in case.capabilities]
