"""Let a worker on a CPU sleep: vLLM's own sleep of accelerators over an emulated pool (`sleep_pool`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import compressed_tensors.compressors  # noqa: F401  whose module constants would be allocated in the pool
import torch
from sleep_pool import SleepPool
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

try:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
except ImportError:  # vLLM 0.24, whose worker asks the allocator itself
    SleepModeBackend = object


class PooledBackend(SleepModeBackend):
    """Suspend and resume the emulated pool, with the tags that vLLM's own backend uses."""

    def __init__(self, pool: SleepPool) -> None:
        super().__init__()
        self._pool = pool

    def suspend(self, level: int = 1) -> None:
        """Give memory back; level 1 keeps weights."""
        self._pool.sleep(("runtime", "cudagraph", *(("weights",) if level == 1 else ())))

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring memory back."""
        self._pool.wake_up(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give the memory of some tags back."""
        self._pool.discard(tags)


class PooledAllocator:
    """What vLLM 0.24's worker asks in place of a backend."""

    def __init__(self, pool: SleepPool) -> None:
        self._pool = pool
        self.wake_up = pool.wake_up

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """Give memory back; the tags named are kept."""
        self._pool.sleep(("runtime", "cudagraph", *offload_tags))


class PooledWorker(CPUWorker):
    """A worker on a CPU whose memory goes away as an accelerator's does.

    ``sleep`` and ``wake_up`` are those of vLLM's ``gpu_worker.Worker``, looked up when they are called: patches of them act."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = SleepPool()
        self._sleep_mode_backend = PooledBackend(self.pool)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return self.pool.use_memory_pool(tag) if tag in ("weights", "kv_cache") else nullcontext()

    def sleep(self, level: int = 1) -> None:
        with accelerator(self.pool):
            gpu_worker.Worker.sleep(self, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with accelerator(self.pool):
            gpu_worker.Worker.wake_up(self, tags)

    def _save_sleep_parameters(self, model: torch.nn.Module) -> None:
        """Save what vLLM's own method would: it passes over tensors that are on a CPU already."""
        with mock.patch.object(torch.Tensor, "is_cpu", False):
            gpu_worker.Worker._save_sleep_parameters(self, model)
        saved = self._sleep_saved_parameters
        self._sleep_saved_parameters = {name: tensor.clone() for name, tensor in saved.items()}

    def discard(self, tags: tuple[str, ...]) -> None:
        gpu_worker.Worker.discard(self, tags)


@contextmanager
def accelerator(pool: SleepPool) -> Iterator[None]:
    """Let the calls about an accelerator's memory return where there is none."""
    allocator = PooledAllocator(pool)
    with (
        mock.patch.object(gpu_worker, "get_mem_allocator_instance", lambda: allocator, create=True),
        mock.patch.object(torch.cuda, "mem_get_info", lambda *args: (0, 1)),
        mock.patch.object(torch.accelerator, "synchronize", lambda *args: None),
        mock.patch.object(torch.accelerator, "get_memory_info", lambda *args: (0, 1)),
    ):
        yield
