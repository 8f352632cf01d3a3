"""Let a name of SGLang's stand for a new adapter at once, and the old one end with its requests."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.events import REQUESTS_RUN

logger = logging.getLogger("flashpatch.fp8")

TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"
REGISTRY = "sglang.srt.lora.lora_registry:LoRARegistry"

_replaced: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""By registry, the adapters whose names stand for others by now."""
_dropping: set[asyncio.Task[None]] = set()


patches = Patches(
    "fp8",
    "sglang>=0.5.12",
    framework="sglang_lora",
    scope="driver",
    evidence="optional",  # an engine may have no adapters
    why="SGLang takes no adapter under a name that it holds. Who unloads the old one first has none if the new one is refused.",
    remove_when="SGLang replaces an adapter under its name without a moment in which there is none.",
)


@patches.wrap(f"{TOKENIZER}.load_lora_adapter", relies_on="self.lora_registry.register")
async def tokenizer_load_lora_adapter(original, self, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the new adapter beside the old, give it the name when all ranks hold it, and unload the old one when its requests
    have ended; under in_flight=refuse an adapter with requests is not replaced."""
    return await replace(original, self, obj, patches.of(tokenizer_load_lora_adapter).id, *args, **kwargs)


@patches.wrap(
    f"{TOKENIZER}.load_lora_adapter_from_tensors",
    relies_on=(
        "self.lora_registry.register",
        "self.lora_update_lock",
        "self.update_lora_adapter_communicator",
        f"{REGISTRY}.get_all_adapters",
        f"{REGISTRY}.wait_for_unload",
        "sglang.srt.managers.io_struct:LoRAUpdateOutput.error_message",
        "sglang.srt.managers.io_struct:UnloadLoRAAdapterReqInput.lora_id",
    ),
    when="anywhere=fp8.verl_sglang.load_lora_adapter_from_tensor",
    how=patches.of(tokenizer_load_lora_adapter).how,
)
async def tokenizer_load_lora_adapter_from_tensors(
    original, self, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """See `replace`."""
    patch = patches.of(tokenizer_load_lora_adapter_from_tensors).id
    return await replace(original, self, obj, patch, *args, **kwargs)


async def replace(original, manager: Any, obj: Any, patch: str, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter; one that has its name goes when its requests have ended.

    Args:
        original: SGLang's method, which sends ``obj`` to all ranks and registers the name if they took it.
        manager: SGLang's ``TokenizerManager``.
        obj: the request.
        patch: id of the patch that asks."""
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    registry = manager.lora_registry
    held = registry.get_all_adapters().get(obj.lora_name)
    if held is not None and (problem := _objection(registry, held, patch)):
        return LoRAUpdateOutput(success=False, error_message=problem)
    answer = await original(manager, obj, *args, **kwargs)
    for old in _replaced.pop(registry, ()):
        drop = asyncio.ensure_future(_drop(manager, old))
        if _running(registry, old):
            _dropping.add(drop)
            drop.add_done_callback(_dropping.discard)
        else:
            await drop
    return answer


@patches.wrap(
    f"{REGISTRY}.register",
    relies_on=("self._registry_lock", "self._register_adapter"),
    why="SGLang's registry refuses a name that it has.",
)
async def register(original, self, lora_ref: Any) -> None:
    """Put the new adapter in the place of the old one in one step, under the registry's lock: no request finds its name free."""
    if lora_ref.lora_name not in self.get_all_adapters():
        return await original(self, lora_ref)
    async with self._registry_lock.writer_lock:
        _replaced.setdefault(self, []).append(self._registry.pop(lora_ref.lora_name))
        self._register_adapter(lora_ref)


def _running(registry: Any, ref: Any) -> int:
    counter = registry._counters.get(ref.lora_id)
    return 0 if counter is None else counter.value()


def _objection(registry: Any, held: Any, patch: str) -> str:
    """Return why an adapter cannot be replaced now, or an empty string."""
    running = _running(registry, held)
    if not running or engine.options("fp8")["in_flight"] == "keep":
        return ""
    return str(
        PatchError(
            f"{REQUESTS_RUN} under the LoRA adapter {held.lora_name!r} ({running}), so its replacement is refused",
            patch=patch,
            advice="Wait for them, give the new adapter a name of its own, or set in_flight=keep, by which they end under the "
            "adapter that they began with.",
        )
    )


async def _drop(manager: Any, old: Any) -> None:
    """Unload an adapter on all ranks when no request needs it."""
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    await manager.lora_registry.wait_for_unload(old.lora_id)
    async with manager.lora_update_lock:
        request = UnloadLoRAAdapterReqInput(lora_name=old.lora_name, lora_id=old.lora_id)
        for answer in await manager.update_lora_adapter_communicator(request):
            if not answer.success:
                logger.warning("the replaced LoRA adapter %s stays in memory: %s", old, answer.error_message)
