"""Give an SGLang engine on a CPU the memory saver of an accelerator (``torch_memory_saver``); see `sleep_pool`.

`install` must run before the engine's processes are forked. What is allocated in SGLang's region ``weights`` is then overwritten
at a release and again at the resume, so that nothing written in between stays. The KV cache keeps its memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sleep_pool import SleepPool

KEPT = "kept"  # the pool's tag of weights that SGLang copies to the host


class Saver:
    """The interface of ``torch_memory_saver.torch_memory_saver``, as far as SGLang's adapter uses it."""

    enabled = True

    def __init__(self) -> None:
        self._pool = SleepPool()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with (
            self._pool.use_memory_pool(KEPT if enable_cpu_backup else tag)
            if tag == "weights"
            else nullcontext()
        ):
            yield

    def pause(self, tag: str) -> None:
        if tag == "weights":
            self._pool.sleep(kept={KEPT})

    def resume(self, tag: str) -> None:
        if tag == "weights":
            self._pool.wake_up()


class Package:
    """The package itself."""

    @staticmethod
    def configure_subprocess() -> Any:
        return nullcontext()


def install() -> None:
    """Let SGLang's adapter find the saver; without CUDA it would not load."""
    from sglang.srt.utils import torch_memory_saver_adapter as adapter

    adapter.import_error, adapter._memory_saver, adapter.torch_memory_saver = None, Saver(), Package
