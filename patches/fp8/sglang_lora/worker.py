"""Put a LoRA adapter in place on all ranks of an SGLang engine, or on none."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.sglang import receipts

if TYPE_CHECKING:
    from flashpatch.patches.fp8.lora.adapters import Adapters

WORKER = "sglang.srt.managers.tp_worker:BaseTpWorker"
MANAGER = "sglang.srt.lora.lora_manager:LoRAManager"

_followed: weakref.WeakKeyDictionary[Any, Adapters] = weakref.WeakKeyDictionary()


def of(manager: Any) -> Adapters | None:
    """Return the adapters of SGLang's ``LoRAManager``; None if the weights of its model are not followed."""
    from flashpatch.patches.fp8.lora.adapters import Adapters

    managed = model_registry.get(manager.base_model)
    if managed is not None and manager not in _followed:
        _followed[manager] = Adapters(managed.adapter.make_consensus("lora"))
    return _followed.get(manager)


patches = Patches(
    "fp8",
    "sglang>=0.5.12",
    framework="sglang_lora",
    scope="worker",
    evidence="optional",  # an engine may have no adapters
    why="SGLang takes NaN, tensors of a wrong shape or for modules that it does not have, and ends at the first request that "
    "needs them; it refuses a name that it holds, so a sender unloads the old adapter first; and only the first rank answers.",
    remove_when="SGLang stages an adapter, checks it, and puts it in place on all ranks or on none.",
)


@patches.wrap(f"{WORKER}.load_lora_adapter", relies_on="self.model_runner.load_lora_adapter")
def load_lora_adapter(original, self, recv_req: Any) -> Any:
    """Load the adapter beside the one in place, in memory of its own, check it against the engine's layers, agree over the
    ranks, put it in place, agree again."""
    return load(original, self, recv_req, patches.of(load_lora_adapter).id)


@patches.wrap(
    f"{WORKER}.load_lora_adapter_from_tensors",
    relies_on=(
        "self.model_runner.load_lora_adapter_from_tensors",
        "recv_req.to_ref",
        f"{MANAGER}.create_lora_update_result",
        "sglang.srt.lora.lora:LoRAAdapter._process_weight",
        "sglang.srt.lora.layers:FusedMoEWithLoRA",
        "sglang.srt.managers.io_struct:LoadLoRAAdapterFromTensorsReqInput.to_ref",
    ),
    when="anywhere=fp8.verl_sglang.load_lora_adapter_from_tensor",
    how=patches.of(load_lora_adapter).how,
)
def load_lora_adapter_from_tensors(original, self, recv_req: Any) -> Any:
    """See `load`."""
    return load(original, self, recv_req, patches.of(load_lora_adapter_from_tensors).id)


def load(original, worker: Any, recv_req: Any, patch: str) -> Any:
    """Stage, check, agree and place an adapter, beside one of the same name if there is one.

    SGLang knows an adapter by an id that each loading has anew, so requests that run under the one before keep it.

    Args:
        original: SGLang's method, which loads into the manager's tables.
        worker: SGLang's ``TpModelWorker``.
        recv_req: as the tokenizer's process sends it to all ranks; its ``rid`` asks for receipts.
        patch: id of the patch that asks.

    Returns:
        SGLang's ``LoRAUpdateOutput``: a refusal is an answer."""
    from flashpatch.patches.fp8.sglang_lora import staging

    manager = worker.model_runner.lora_manager
    adapters = of(manager)
    if adapters is None:
        return original(worker, recv_req)
    ref, began, staged = recv_req.to_ref(), time.perf_counter(), []

    def stage() -> str:
        refuse_untested(manager, patch)
        with staging.unnamed(manager, ref.lora_name), staging.sent() as parts:
            try:
                answer = original(worker, recv_req)
            finally:
                staged.append(staging.Staged(manager, ref.lora_id))
        if not answer.success:
            raise PatchError(
                f"SGLang refuses the LoRA adapter {ref.lora_name!r}: {answer.error_message}",
                patch=patch,
                advice="The adapter from before stays in place. Mend what the trainer sends, or the engine's lora settings.",
            )
        return staging.checked(manager, staged[0], ref.lora_name, parts, patch)

    try:
        adapters.replace(
            (ref.lora_name, ref.lora_id, ref.lora_path or "", ref.lora_id),
            stage,
            lambda: staged[0].place(),
            lambda: staged[0].restore(),
        )
    except Exception as error:
        return manager.create_lora_update_result(success=False, error_message=str(error))
    text = ""
    if recv_req.rid:
        text = receipts.of_adapter(
            worker.model_runner, recv_req.rid, adapters.digests(), time.perf_counter() - began
        )
    return manager.create_lora_update_result(success=True, error_message=text)


@patches.wrap(
    f"{WORKER}.unload_lora_adapter",
    relies_on="self.model_runner.unload_lora_adapter",
    why="The account of adapters must lose one that is unloaded.",
)
def unload_lora_adapter(original, self, recv_req: Any) -> Any:
    """After SGLang has unloaded an adapter, note that it is no longer held."""
    result = original(self, recv_req)
    adapters = _followed.get(self.model_runner.lora_manager)
    if adapters is not None:
        adapters.keep_only(self.model_runner.lora_manager.lora_refs)
    return result


def refuse_untested(manager: Any, patch: str) -> None:
    """Raise PatchError if some layers with adapters are experts, which could not be checked, or the engine has parts that
    were never run beside adapters."""
    found = list(_untested(manager))
    if found:
        raise PatchError(
            f"LoRA adapters on SGLang were never run beside {', '.join(found)}",
            patch=patch,
            advice="Merge them into the weights that the trainer sends.",
        )


def _untested(manager: Any) -> Iterator[str]:
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    layers = (layer for layers in manager.lora_modules for layer in layers.values())
    if any(isinstance(layer, FusedMoEWithLoRA) for layer in layers):
        yield "experts"
    if getattr(manager, "enable_lora_overlap_loading", False):
        yield "enable_lora_overlap_loading"
    if getattr(manager, "attn_dp_enabled", False):
        yield "attention data parallelism"
