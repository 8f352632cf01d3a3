"""Measure what an update of an engine of `cuda_lab.sizes`' shapes takes, by the clock and in calls of Python.

    python -m cuda_lab.updates fresh|update CHECKPOINTS OUT MODEL_PRECISION

`fresh` is vLLM's own reload in one call, `update` FlashPatch's in each size of bucket, under `ATOMIC`'s option."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
from felting import counting, models, updates

from cuda_lab import engine, results
from cuda_lab.sizes import GIB, HERE, Size


def main(mode: str, root: str, out: str, name: str) -> None:
    results.add(out, name, results.attempt(lambda: measured(Path(root), mode == "update", *name.split("_"))))
    results.leave()


def measured(root: Path, ours: bool, model: str, precision: str) -> dict[str, Any]:
    """Say by way of an update its seconds, calls of Python, and the most bytes beside the model."""
    size = {"7B": HERE.dense, "30B": HERE.experts}[model]
    models.MODELS[model] = size
    precision = "W8A8" if precision == "int8" and not ours else precision
    llm = models.opened(root / os.environ.get("ATOMIC", "stock"), model, precision)
    policy, own = sent(size, precision), counting.Own(vllm)
    runner, said = engine.worker(llm).model_runner, []
    atomic = os.environ.get("ATOMIC", "")
    for way, limit in HERE.buckets.items() if ours else [("vLLM's reload", 0)]:

        def update(around: Any, limit: int = limit) -> Any:
            with around as counted:
                (updates._in_buckets if ours else updates._by_vllm)(runner, policy, limit)
            return counted

        update(nullcontext())  # what torch and vLLM make once
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        seconds = counting.milliseconds(lambda: update(nullcontext())) / 1000  # noqa: B023
        peak = torch.cuda.max_memory_allocated() - held
        calls = update(own.calls())["all"]
        said.append(f"{way} {atomic}: {seconds:.3f} s, {calls} calls, {peak / GIB:.2f} GiB")
    return {"said": "; ".join(said)}


def sent(size: Size, precision: str) -> list[tuple[str, torch.Tensor]]:
    """Return random tensors by name, as trainers send them, cut from memory twice as large as the largest: a second policy would
    not fit beside one of 57 GiB under ``atomic = "model"``. For W8A8 int8 with scales, rounded already."""
    largest = max(torch.Size(shape).numel() for _, shape in size.shapes())
    source, at, found = torch.randn(2 * largest, device="cuda", dtype=torch.bfloat16) / 50, 0, []
    rounded = (source * 500).to(torch.int8) if precision == "W8A8" else source
    for path, shape in size.shapes():
        count = torch.Size(shape).numel()
        at = at if at + count <= len(source) else 0
        if precision == "W8A8" and path.endswith("proj.weight"):
            found.append((path, rounded[at : at + count].view(shape)))
            found.append((f"{path}_scale", torch.full((shape[0], 1), 0.002, device="cuda")))
        else:
            found.append((path, source[at : at + count].view(shape)))
        at += count
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
