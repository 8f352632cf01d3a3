"""A plugin of vLLM's: what an engine holds after each sync, appended to the file LAB_SERVED as its KV cache wakes up."""

import itertools
import os
from typing import Any

import wrapt


def install() -> None:
    if out := os.environ.get("LAB_SERVED"):
        wrapt.when_imported("vllm.v1.worker.gpu_worker")(lambda module: note(module.Worker, out))


def note(kind: type, out: str) -> None:
    """Let each worker append by number of its syncs what `engine.told` says of it.

    The worker's own attribute is another, not its class's: that is FlashPatch's, which takes no target that others hold."""
    started = kind.init_device

    def init_device(self: Any) -> None:
        started(self)
        woken, syncs = self.wake_up, itertools.count()

        def wake_up(tags: list[str] | None = None) -> None:
            from cuda_lab import engine, results

            woken(tags)
            if tags is None or "kv_cache" in tags:
                results.add(out, str(next(syncs)), engine.told(self))

        self.wake_up = wake_up

    kind.init_device = init_device
