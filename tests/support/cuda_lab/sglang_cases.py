"""The storage cases of SGLang: a model, how it is quantized, and what the engine is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One model to load and to update.

    Attributes:
        family: of `vllm_lab.models.FAMILIES`.
        scheme: how the checkpoint is quantized; "" for bf16.
        engine: further arguments of the engine.
        config: changes of the model's config.
        capabilities: compute capabilities that the case runs on, times ten.
        changed: least number of tensors that an update changes.
    """

    family: str
    scheme: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    capabilities: tuple[int, ...] = (90,)
    changed: int = 10


def online(scheme: str, **more: Any) -> dict[str, Any]:
    return {"quantization": scheme, **more}


CASES: dict[str, Case] = {
    "bf16": Case("llama"),
    "fp8": Case("llama", engine=online("fp8"), capabilities=(80, 90)),
    "w8a8_fp8": Case("llama", engine=online("w8a8_fp8")),
    "w8a8_int8": Case("llama", "int8"),
    "block": Case("llama", "block", capabilities=(80, 90)),
    "static_kv": Case("llama", "static-kv", dict(kv_cache_dtype="fp8_e4m3"), capabilities=(80, 90)),
    "ct_channel": Case("llama", "fp8-channel"),
    "w4a16": Case("llama", "w4a16"),
    "moe_bf16": Case("qwen3-moe"),
    "moe_fp8": Case("qwen3-moe", engine=online("fp8")),
    "moe_block": Case("qwen3-moe", "block"),
}


def of(capability: int) -> list[str]:
    """Return the names of the cases that a device of this capability has."""
    return [name for name, case in CASES.items() if capability in case.capabilities]
