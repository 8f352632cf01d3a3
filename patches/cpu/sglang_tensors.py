"""Send weights to SGLang's server through shared memory of the host."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flashpatch.record import Contract, Patch

_STRATEGY = "file_system"
"""Torch's way to share storages by name. Its default passes file descriptors, which unrelated processes refuse."""

_ATTEMPTS = 6
_TIMED_OUT = "Shared memory manager connection has timed out"


async def on_update(
    original, engine: Any, params_batch: list[tuple[str, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Around ``update_weights``: pickle copies, since pickling moves a tensor's own storage into shared memory."""
    copies = [(name, tensor.detach().clone()) for name, tensor in params_batch]
    with _shared_by_name():
        for _, copy in copies:
            await _share(copy)
        return await original(engine, copies, *args, **kwargs)


def on_wrap(original, self, peft_config: dict[str, Any], weights: Iterable[tuple[str, Any]]) -> Any:
    """Around ``wrap_lora_params``: pickle copies, kept until the next ones, as the server opens them by name later."""
    _sent[self] = [(name, tensor.detach().clone()) for name, tensor in weights]
    with _shared_by_name():
        return original(self, peft_config, _sent[self])


_sent: weakref.WeakKeyDictionary[Any, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()


def on_modify(original, values: tuple, index: int, modifier: Callable) -> tuple:
    """Around ``_modify_tuple``, which exchanges a device's number: pickled CPU tensors have none."""
    return original(values, index, modifier) if index < len(values) else values


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


_patch = partial(
    Patch,
    requires="sglang>=0.5.12",
    evidence="optional",  # only if rollouts are SGLang's
    scope=frozenset({"trainer"}),
    needs=("cpu.verl.register_platform",),
)

SHARE = _patch(
    id="cpu.sglang.update_weights",
    targets=("sglang.srt.weight_sync.utils:update_weights",),
    wrapper=on_update,
    contract=Contract(
        params=("engine", "params_batch", "device_mesh_key", "device_mesh"),
        mentions=("MultiprocessingSerializer.serialize",),
    ),
    why="Tensors on a CPU are pickled as file descriptors, which the server, no child of the trainer, refuses with an "
    "AuthenticationError; and the trainer's own parameters would become shared memory.",
    how="Pickles copies that are shared by name, and asks again if torch's manager of shared memory was late.",
    remove_when="SGLang's update_weights shares CPU tensors by name.",
)

ADAPTER = _patch(
    id="cpu.verl_sglang.wrap_lora_params",
    targets=("verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter.wrap_lora_params",),
    requires="verl>=0.9",
    beside="sglang>=0.5.12",
    wrapper=on_wrap,
    contract=Contract(params=("peft_config", "weights"), mentions=("MultiprocessingSerializer.serialize",)),
    why=SHARE.why,
    how="Pickles copies of an adapter's tensors that are shared by name.",
    remove_when=SHARE.remove_when,
)

REDUCE = _patch(
    id="cpu.sglang.modify_tuple",
    targets=("sglang.srt.utils.patch_torch:_modify_tuple",),
    wrapper=on_modify,
    contract=Contract(params=("t", "index", "modifier")),
    why="SGLang's change to torch's pickling looks for a device's number where a CPU tensor has nothing: IndexError.",
    how="Leaves tuples without that place as they are.",
    upstream="sglang/srt/utils/patch_torch.py: monkey_patch_torch_reductions",
    remove_when="SGLang changes the pickling of CUDA tensors only.",
)
