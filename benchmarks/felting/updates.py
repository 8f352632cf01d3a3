"""Updates of an engine, counted: in one call and in buckets under FlashPatch, by vLLM's own reload without it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm

from felting import counting, models

MIB = 1 << 20
BUCKETS = {"one call": 1 << 60, "512 MiB": 512 * MIB, "16 MiB": 16 * MIB}
PARTS = {"one call": 1, "2 buckets": 2, "30 buckets": 30}  # of narrow layers, by bytes one bucket


def measured(folder: Path, model: str, precision: str, ours: bool) -> dict[str, Any]:
    """Open an engine in bf16, fp8 or int8, and return by way of an update what it takes; ``ours``: FlashPatch is on."""
    from cuda_lab import engine

    precision = "W8A8" if precision == "int8" and not ours else precision
    llm = models.opened(folder, model, precision)
    runner, own = engine.worker(llm).model_runner, counting.Own(vllm)
    policy = models.policy(model, precision)
    layers = (sum(one.nbytes for one in part.parameters(False)) for part in runner.model.modules())
    sent = sum(tensor.nbytes for _, tensor in policy)
    found: dict[str, Any] = {"sizes": dict(sent=sent, tensors=len(policy), layer=max(layers))}
    largest = max(tensor.nbytes for _, tensor in policy)
    by_number = {way: sent // parts + largest for way, parts in PARTS.items()}
    cuts = by_number if model in ("28", "experts") else BUCKETS
    for way, limit in cuts.items() if ours else [("reload", 0)]:

        def update(around: Any, limit: int = limit) -> Any:
            for _, tensor in policy:
                tensor.neg_()
            with around as counted:
                (_in_buckets if ours else _by_vllm)(runner, policy, limit)
            return counted

        if len(found) == 1:
            update(nullcontext())  # what torch and vLLM make once
        found[way] = _counted(update, own)
    return found


def _counted(update: Callable[[Any], Any], own: counting.Own) -> dict[str, Any]:
    """Count one update, the calls of Python in another, and take the thread's processor time of a third."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    before = counting.memory()
    seen = update(counting.launches())
    found = dict(
        launches=seen.seen.total(),
        waits=seen.waits.total(),
        touched=seen.touched,
        host=seen.host,
        pinned=counting.memory()["pinned"] - before["pinned"],
        peak=torch.cuda.max_memory_allocated() - allocated,
        held=torch.cuda.memory_allocated() - allocated,
        reserved=torch.cuda.memory_reserved() - reserved,
        operators=dict(seen.seen.most_common(12)),
        waiting=dict(+seen.waits),
    )
    found["calls"] = update(own.calls())["all"]
    began = time.thread_time()
    update(nullcontext())
    found["ms"] = 1000 * (time.thread_time() - began)
    return found | {"wall": statistics.median(update(counting.clock())[0] for _ in range(3))}


def _in_buckets(runner: Any, policy: list[tuple[str, torch.Tensor]], limit: int) -> None:
    """As trainers do whose sync FlashPatch knows: a begin, load_weights for each part, and at last post-processing."""
    from random_models import buckets
    from vllm.model_executor.model_loader import base_loader

    from flashpatch.patches.fp8 import model_registry

    with torch.no_grad():
        if (managed := model_registry.get(runner.model)) is not None:
            managed.begin()
        for bucket in buckets(policy, limit):
            runner.model.load_weights(iter(bucket))
        base_loader.process_weights_after_loading(runner.model, runner.model_config, runner.device)


def _by_vllm(runner: Any, policy: list[tuple[str, torch.Tensor]], limit: int) -> None:
    runner.reload_weights(weights_iterator=iter(policy))
