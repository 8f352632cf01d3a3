"""Send weights to SGLang's server through shared memory of the host."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flashpatch.decorate import Patches

_STRATEGY = "file_system"
"""Torch's way to share storages by name. Its default passes file descriptors, which unrelated processes refuse."""

_ATTEMPTS = 6
_TIMED_OUT = "Shared memory manager connection has timed out"


_COPIES = "MultiprocessingSerializer.serialize"
_WHY = (
    "Tensors on a CPU are pickled as file descriptors, which the server, no child of the trainer, refuses with an "
    "AuthenticationError; and the trainer's own parameters would become shared memory."
)

_sent: weakref.WeakKeyDictionary[Any, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()
"""By adapter: the copies of its tensors that were pickled last, as the server opens them by name later."""

patches = Patches(
    "cpu",
    "sglang>=0.5.12",
    scope="trainer",
    evidence="optional",  # only if rollouts are SGLang's
    needs="cpu.verl.register_platform",
    remove_when="SGLang's update_weights shares CPU tensors by name.",
)


@patches.wrap(
    "sglang.srt.weight_sync.utils:update_weights",
    params=("engine", "params_batch", "device_mesh_key", "device_mesh"),
    relies_on=_COPIES,
    why=_WHY,
)
async def update_weights(
    original, engine: Any, params_batch: list[tuple[str, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Pickle copies that are shared by name, and ask again if torch's manager of shared memory was late."""
    copies = [(name, tensor.detach().clone()) for name, tensor in params_batch]
    with _shared_by_name():
        for _, copy in copies:
            await _share(copy)
        return await original(engine, copies, *args, **kwargs)


async def _share(tensor: Any) -> None:
    """Move a tensor into shared memory; torch's manager of it has a second to answer, which on a busy machine is short."""
    for attempt in range(_ATTEMPTS):
        try:
            tensor.share_memory_()
            return
        except RuntimeError as error:
            if _TIMED_OUT not in str(error) or attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep(0.2 * 2**attempt)


@contextmanager
def _shared_by_name() -> Iterator[None]:
    import torch

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(_STRATEGY)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@Patches("cpu", "verl>=0.9", framework="verl_sglang", beside="sglang>=0.5.12").wrap(
    "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter.wrap_lora_params",
    relies_on=_COPIES,
    scope="trainer",
    evidence="optional",
    needs="cpu.verl.register_platform",
    why=_WHY,
    remove_when="SGLang's update_weights shares CPU tensors by name.",
)
def wrap_lora_params(original, self, peft_config: dict[str, Any], weights: Iterable[tuple[str, Any]]) -> Any:
    """Pickle copies of an adapter's tensors that are shared by name."""
    _sent[self] = [(name, tensor.detach().clone()) for name, tensor in weights]
    with _shared_by_name():
        return original(self, peft_config, _sent[self])


@patches.wrap(
    "sglang.srt.utils.patch_torch:_modify_tuple",
    why="SGLang's change to torch's pickling looks for a device's number where a CPU tensor has nothing: IndexError.",
    upstream="sglang/srt/utils/patch_torch.py: monkey_patch_torch_reductions",
    remove_when="SGLang changes the pickling of CUDA tensors only.",
)
def modify_tuple(original, t: tuple, index: int, modifier: Callable) -> tuple:
    """Leave tuples without that place as they are."""
    return original(t, index, modifier) if index < len(t) else t
