"""The storage cases: a model, how it is quantized, what its engine is told, and the kernel that its layers must have."""

from dataclasses import dataclass, field, replace
from typing import Any

from installed import version_of
from packaging.version import Version


@dataclass(frozen=True)
class Case:
    """One engine to load and to update."""

    family: str  # of `vllm_lab.models.FAMILIES`
    # By compute capability, part of a class name that the layers must show; "" if no kernel object does.
    kernels: dict[int, str]
    scheme: str = ""  # how the checkpoint is quantized; "" for bf16
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of the engine
    config: dict[str, Any] = field(default_factory=dict)  # changes of the model's config
    changed: int = 10  # least number of tensors that an update changes
    least: str = "0"  # the oldest vLLM that can open it


def online(scheme: str, **more: Any) -> dict[str, Any]:
    return {"quantization": scheme, **more}


def backend(kind: str, name: str) -> dict[str, Any]:
    return {"kernel_config": {f"{kind}_backend": name}}


# The dimensions that MLA's kernels on CUDA know.
MLA = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)

FP8 = "fp8_per_tensor"  # as FlashPatch opens an engine that asks for "fp8", so fresh ones are opened alike

CASES: dict[str, Case] = {
    "bf16": Case("llama", {80: "", 89: "", 90: "", 100: "", 120: ""}),
    "fp8": Case(
        "llama", {80: "Marlin", 89: "Cutlass", 90: "Cutlass", 100: "FP8", 120: "Cutlass"}, engine=online(FP8)
    ),
    "fp8_channel": Case(
        "llama", {89: "Cutlass", 90: "Cutlass", 120: "Cutlass"}, engine=online("fp8_per_channel")
    ),
    "fp8_block": Case("llama", {80: "Marlin", 90: "DeepGemm"}, engine=online("fp8_per_block")),
    "fp8_marlin": Case(
        "llama", {90: "Marlin"}, engine=online(FP8, **backend("linear", "marlin")), least="0.33"
    ),
    "ct_channel": Case("llama", {89: "Cutlass", 90: "Cutlass"}, "fp8-channel"),
    "ct_tensor": Case("llama", {90: "Cutlass"}, "fp8-tensor"),
    "w4a16": Case("llama", {80: "Marlin", 90: "Machete", 100: "Marlin", 120: "Marlin"}, "w4a16"),
    "int8": Case("llama", {80: "CutlassInt8", 90: "CutlassInt8"}, "int8"),
    "block": Case("llama", {80: "Marlin", 90: "DeepGemm", 100: "DeepGemm"}, "block"),
    "block_cutlass": Case("llama", {90: "CutlassFp8Block"}, "block", backend("linear", "cutlass")),
    "block_triton": Case("llama", {90: "TritonFp8Block"}, "block", backend("linear", "triton")),
    "static_kv": Case(
        "llama",
        {80: "Marlin", 89: "", 90: "Cutlass", 100: "", 120: ""},
        "static-kv",
        {"kv_cache_dtype": "fp8"},
    ),
    # On 9.0 vLLM takes Humming for both, which is compiled at run time.
    "nvfp4": Case("llama", {80: "MarlinNvFp4", 100: "NvFp4"}, "nvfp4", least="0.33"),
    "mxfp4": Case("llama", {80: "MarlinMxFp4"}, "mxfp4", least="0.33"),
    "moe_bf16": Case("qwen3-moe", {80: "TritonExperts", 90: "TritonExperts", 100: "Experts"}),
    "moe_fp8": Case(
        "qwen3-moe",
        {80: "Marlin", 90: "TritonExperts", 100: "Experts", 120: "TritonExperts"},
        engine=online(FP8),
    ),
    "moe_block": Case("qwen3-moe", {80: "Marlin", 90: "TritonExperts"}, "block"),
    "moe_fp8_triton": Case(
        "qwen3-moe", {100: "TritonExperts"}, engine=online(FP8, **backend("moe", "triton"))
    ),
    "moe_fp8_marlin": Case(
        "qwen3-moe", {90: "MarlinExperts"}, engine=online(FP8, **backend("moe", "marlin"))
    ),
    "moe_block_deep_gemm": Case(
        "qwen3-moe", {90: "DeepGemmExperts", 100: "DeepGemmExperts"}, "block", backend("moe", "deep_gemm")
    ),
    "mla_bf16": Case("deepseek-v2", {80: "", 90: ""}, config=MLA),
    "mla_fp8": Case(
        "deepseek-v2",
        {80: "Marlin", 90: "Cutlass", 100: "FP8", 120: "Cutlass"},
        engine=online(FP8),
        config=MLA,
    ),
    "mla_block": Case("deepseek-v2", {80: "Marlin", 90: "DeepGemm"}, "block", config=MLA),
    "gpt_oss": Case("gpt-oss", {90: "Experts"}, least="0.33"),
    "qwen3_next": Case("qwen3-next", {90: "Experts"}),
    "falcon_h1": Case("falcon-h1", {90: ""}),
}
CASES["mla_fp8_engine"] = replace(  # Triton's interpreter runs its decode
    CASES["mla_fp8"], kernels={}, engine=online(FP8, attention_backend="TRITON_MLA")
)
# From 10.0 on vLLM's attention is FlashInfer's, which is compiled at run time.
ATTENTION = dict(attention_backend="FLASH_ATTN")
CASES["int8_engine"] = replace(CASES["int8"], kernels={}, engine=ATTENTION)
CASES["int8_triton"] = replace(CASES["int8"], kernels={}, engine={**ATTENTION, **backend("linear", "triton")})
CASES["block_kv"] = Case(  # brings no scales of its cache, which then keeps the constructor's
    "llama", {}, "block", {"kv_cache_dtype": "fp8", **backend("linear", "cutlass")}
)
CASES["fp8_ipc"] = Case("llama", {}, engine=online(FP8, weight_transfer_config={"backend": "ipc"}))
VERL = dict(worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension")
CASES["bf16_verl"] = Case("llama", {}, engine=VERL)
CASES["fp8_verl"] = Case("llama", {}, engine=online(FP8, **VERL))
CASES["default_verl"] = Case("llama", {}, engine=VERL)  # as FLASHPATCH=fp8 opens it
CASES["block_kv_verl"] = Case("llama", {}, "block", {**CASES["block_kv"].engine, **VERL})
TWO_RANKS = dict(tensor_parallel_size=2, distributed_executor_backend="mp", disable_custom_all_reduce=True)
CASES["bf16_tp2"] = Case("llama", {}, engine=TWO_RANKS)
CASES["fp8_tp2"] = Case("llama", {}, engine=online(FP8, **TWO_RANKS))
CASES["alibi"] = Case("bloom", {})  # whose attention holds a tensor that no update brings
# Whose experts stock never loads.
CASES["gpt_oss_fp8"] = Case("gpt-oss", {}, engine=online(FP8), least="0.33")
AT_ONCE = ("fp8", "block", "w4a16", "static_kv", "moe_fp8", "mla_bf16", "mla_fp8")  # under atomic=model too
SMOKE = ("static_kv", "moe_fp8")  # on 9.0, in `make test`


def of(capability: int) -> list[str]:
    """Return the names of the cases that a device of this capability and the installed vLLM have."""
    installed = version_of("vllm")
    return [
        name
        for name, case in CASES.items()
        if capability in case.kernels and installed >= Version(case.least)
    ]
