"""A plugin of vLLM's: what an engine holds after each sync, appended to the file LAB_SERVED as its KV cache wakes up."""

import itertools
import os
from types import SimpleNamespace
from typing import Any

import wrapt

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


def install() -> None:
    if out := os.environ.get("LAB_SERVED"):
        for name in RUNNERS:
            wrapt.when_imported(name)(lambda module: note(module.GPUModelRunner, out))


def note(runner: type, out: str) -> None:
    """Let the runner append by number of its syncs what `engine.told` says of it."""
    original, syncs = runner.post_kv_cache_wake_up, itertools.count()

    def noted(self: Any) -> None:
        from cuda_lab import engine, results

        original(self)
        results.add(out, str(next(syncs)), engine.told(SimpleNamespace(model_runner=self)))

    runner.post_kv_cache_wake_up = noted
