"""Emulate, for engines on a CPU, the memory pool of vLLM's sleep mode.

``open_llm(model, **environment.SLEEPING)`` opens an engine whose workers (`sleep_worker.PooledWorker`) sleep. On an
accelerator vLLM allocates everything between a model's construction and the end of its first load in a pool, whoever
asks for it: the model, its quantization, patches, a drafter. Sleep gives the pool's memory back. Here the pool
records what operators allocate, and overwrites it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Collection

#: Tags that a wake-up may leave asleep; every other tag is resident after any wake-up.
DEFERRABLE = ("weights", "kv_cache")

#: What each byte of memory is after it was given back. The KV cache: a finite number in all floating formats, since
#: kernels multiply masked values by zero. All else in turn: NaN in all floating formats, -1 in integers; a finite number
#: (0.75 in bf16 and float32), which no check for NaN sees.
_CACHE = 0x42
_TURNS = (0xFF, 0x3F)


@dataclass
class Block:
    """One storage of the pool."""

    reference: StorageWeakRef  # to the storage, weak: whoever uses the memory keeps it
    tag: str  # of the pool that it was allocated in
    saved: torch.Tensor | None = None  # its bytes, while it sleeps at a level that keeps them
    asleep: bool = False  # whether the memory is given back
    garbage: int = _TURNS[0]  # what each byte was when it was given back last

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, None where it is no longer used."""
        return torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)


class SleepPool:
    """Own what is allocated under a tag, and take it away: the interface of vLLM's ``MemAllocator``."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._turns = itertools.cycle(_TURNS)
        self._garbage = _TURNS[0]

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        """Within, whatever operators allocate on the device belongs to the pool."""
        with _Recorder(self._blocks, tag):
            yield

    def sleep(self, kept: Collection[str]) -> None:
        """Give all memory back.

        ``kept``: tags whose contents come back at the wake-up."""
        self._garbage = next(self._turns)
        for block, storage in self._alive():
            if not block.asleep:
                block.saved = _bytes(storage).clone() if block.tag in kept else None
                self._spoil(block, storage)

    def discard(self, tags: Collection[str]) -> None:
        """Give the memory of ``tags`` back; its contents are lost."""
        for block, storage in self._alive():
            if block.tag in tags and not block.asleep:
                self._spoil(block, storage)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring memory back, with what was kept or with garbage: nothing written in between stays.

        ``tags``: of `DEFERRABLE`, those to bring back; None: all."""
        for block, storage in self._alive():
            if block.asleep and (tags is None or block.tag in tags or block.tag not in DEFERRABLE):
                self._spoil(block, storage) if block.saved is None else _bytes(storage).copy_(block.saved)
                block.asleep, block.saved = False, None

    def nbytes(self, tag: str) -> int:
        """Return how many bytes of the pool are in use."""
        return sum(storage.nbytes() for block, storage in self._alive() if block.tag == tag)

    def lost(self, tag: str = "weights") -> list[torch.UntypedStorage]:
        """Return the storages that nobody has written to since a wake-up left garbage in them."""
        return [
            s for block, s in self._alive() if block.tag == tag and bool((_bytes(s) == block.garbage).all())
        ]

    def _spoil(self, block: Block, storage: torch.UntypedStorage) -> None:
        block.garbage = _CACHE if block.tag == "kv_cache" else self._garbage
        _bytes(storage).fill_(block.garbage)
        block.asleep = True

    def _alive(self) -> Iterator[tuple[Block, torch.UntypedStorage]]:
        for key, block in list(self._blocks.items()):
            storage = block.storage()
            if storage is None:
                del self._blocks[key]
            elif storage.nbytes():
                yield block, storage


class _Recorder(TorchDispatchMode):
    """Record each storage that an operator allocates."""

    def __init__(self, blocks: dict[int, Block], tag: str) -> None:
        super().__init__()
        self._blocks, self._tag = blocks, tag

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_host_copy(func, args, kwargs) or _is_address(func, args):
            return result
        copied_in = func is torch.ops.aten.lift_fresh.default  # by torch.tensor(), from Python numbers
        given = set() if copied_in else {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._blocks:
                # The weak reference keeps the identity from being used again.
                self._blocks[storage._cdata] = Block(StorageWeakRef(storage), self._tag)
        return result


def _is_host_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a copy to the CPU was asked for by name, of a tensor that an accelerator would hold."""
    if func is not torch.ops.aten._to_copy.default:
        return False
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    return device is not None and torch.device(device).type == "cpu" and dtype in (None, args[0].dtype)


def _is_address(func: Any, args: tuple) -> bool:
    """Whether a Python integer becomes a tensor: on a CPU, vLLM's oneDNN handlers keep their address so."""
    return func is torch.ops.aten.lift_fresh.default and args[0].dtype == torch.int64 and args[0].dim() == 0


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in nested arguments or results."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from _storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif value.layout is torch.strided and value.device.type == "cpu":
            yield value.untyped_storage()
    elif isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
