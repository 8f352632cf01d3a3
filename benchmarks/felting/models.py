"""Engines on models that are a configuration alone, with random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from random_models import SIZES, Size, configure

PART = dict(layers=2, vocab=15206) if os.environ.get("FAKE_CUDA") else dict(layers=28, vocab=152064)
MODELS = {
    "steps": Size("steps", hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, vocab=512),
    # Qwen2.5-7B; on the fake device two of its layers, and a tenth of its vocabulary.
    "7B": Size("7B", hidden=3584, intermediate=18944, heads=28, kv_heads=4, **PART),
    "half": Size("half", hidden=1792, intermediate=9472, layers=2, heads=14, kv_heads=2, vocab=7603),
    "moe": SIZES[-1],
    # As many tensors as Qwen2.5-7B, narrow as well.
    "28": Size("28", hidden=128, intermediate=256, layers=28, heads=2, kv_heads=1, vocab=512),
    # As many tensors as half of Qwen3-30B-A3B, so narrow that copying is next to nothing.
    "experts": Size(
        "experts", hidden=64, intermediate=16, layers=24, heads=2, kv_heads=1, vocab=512, experts=128
    ),
}


def opened(folder: Path, name: str, precision: str, **more: Any) -> Any:
    """Open an engine: in bf16, in fp8, or in int8 as stock opens a W8A8 checkpoint."""
    import vllm
    from cuda_lab import engine
    from vllm.model_executor.models import registry

    # vLLM inspects architectures in a subprocess only to keep CUDA uninitialised in this one.
    registry._run_in_subprocess = lambda function: function()
    arguments = {**engine.ENGINE, "kernel_config": engine.COLD, **more}
    arguments |= {"enforce_eager": True, "load_format": "dummy"}
    del arguments["max_logprobs"]
    if precision == "fp8":
        arguments["quantization"] = "fp8_per_tensor"
    if precision == "W8A8":
        from flashpatch.patches.fp8.vllm import int8_config

        arguments["hf_overrides"] = {"quantization_config": int8_config.configuration()}
    if (precision in ("int8", "W8A8") or MODELS[name].experts) and os.environ.get("FAKE_CUDA"):
        from vllm.v1.worker import gpu_worker

        # Nothing is run: the fake device has no products of int8, and experts take it a minute.
        gpu_worker.Worker.compile_or_warm_up_model = lambda worker: gpu_worker.CompilationTimes(0.0, 0.0)
        gpu_worker.Worker.determine_available_memory = lambda worker: engine.ENGINE["kv_cache_memory_bytes"]
    if not (folder / name).exists():
        configure(MODELS[name], folder / name)
    return vllm.LLM(str(folder / name), **arguments)


def policy(name: str, precision: str) -> list[tuple[str, Any]]:
    """Return random tensors by name in the device's memory, as trainers send them; for W8A8 int8 with scales.

    They are cut from memory twice as large as the largest: a whole second policy of 57 GiB leaves a GPU no room for a third."""
    import torch

    shapes = [(path, torch.Size(shape)) for path, shape in MODELS[name].shapes()]
    source = torch.randn(1 << 20).bfloat16().cuda() / 50
    source = source.repeat(2 * max(shape.numel() for _, shape in shapes) // source.numel() + 1)
    rounded, at, found = (source * 500).to(torch.int8) if precision == "W8A8" else source, 0, []
    for path, shape in shapes:
        at = at if at + shape.numel() <= len(source) else 0
        quantized = precision == "W8A8" and path.endswith("proj.weight")
        found.append((path, (rounded if quantized else source)[at : at + shape.numel()].view(shape)))
        if quantized:
            found.append((f"{path}_scale", torch.full((shape[0], 1), 0.002, device="cuda")))
        at += shape.numel()
    return found
