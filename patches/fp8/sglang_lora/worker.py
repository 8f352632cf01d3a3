"""Put a LoRA adapter in place on all ranks of an SGLang engine, or on none."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import receipts
from flashpatch.record import Contract, Patch

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
        _followed[manager] = Adapters(managed.adapter.another_consensus("lora"))
    return _followed.get(manager)


def on_path(original, self, recv_req: Any) -> Any:
    """Around ``load_lora_adapter``; see `load`."""
    return load(original, self, recv_req, PATH.id)


def on_tensors(original, self, recv_req: Any) -> Any:
    """Around ``load_lora_adapter_from_tensors``; see `load`."""
    return load(original, self, recv_req, TENSORS.id)


def load(original, worker: Any, recv_req: Any, patch: str) -> Any:
    """Stage, check, agree and place an adapter, beside one of the same name if there is one.

    SGLang knows an adapter by an id that each loading has anew, so requests that run under the one before keep it.

    Args:
        original: SGLang's method, which loads into the manager's tables.
        worker: SGLang's ``TpModelWorker``.
        recv_req: as the tokenizer's process sends it to all ranks; its ``rid`` asks for receipts.
        patch: id of the patch that asks.

    Returns:
        SGLang's ``LoRAUpdateOutput``: a refusal is an answer.
    """
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


def on_unload(original, self, recv_req: Any) -> Any:
    """Around ``unload_lora_adapter``: note that it is no longer held."""
    result = original(self, recv_req)
    adapters = _followed.get(self.model_runner.lora_manager)
    if adapters is not None:
        adapters.keep_only(self.model_runner.lora_manager.lora_refs)
    return result


def refuse_untested(manager: Any, patch: str) -> None:
    """Raise if the engine's adapters could be checked only in part.

    Raises:
        PatchError: some layers with adapters are experts, or the engine has parts that were never run beside adapters.
    """
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


_patch = partial(
    Patch,
    requires="sglang>=0.5.12",
    scope=frozenset({"worker"}),
    evidence="optional",  # an engine may have no adapters
    remove_when="SGLang stages an adapter, checks it, and puts it in place on all ranks or on none.",
)
_load = partial(
    _patch,
    needs=("fp8.sglang_lora.unload_lora_adapter",),
    why="SGLang takes NaN, tensors of a wrong shape or for modules that it does not have, and ends at the first request that "
    "needs them; it refuses a name that it holds, so a sender unloads the old adapter first; and only the first rank answers.",
    how="Loads the adapter beside the one in place, in memory of its own, checks it against the engine's layers, agrees over "
    "the ranks, puts it in place, agrees again.",
)

PATH = _load(
    id="fp8.sglang_lora.load_lora_adapter",
    targets=(f"{WORKER}.load_lora_adapter",),
    wrapper=on_path,
    contract=Contract(params=("recv_req",), mentions=("self.model_runner.load_lora_adapter",)),
)

TENSORS = _load(
    id="fp8.sglang_lora.load_lora_adapter_from_tensors",
    when="anywhere=fp8.verl_sglang.load_lora_adapter_from_tensor",
    targets=(f"{WORKER}.load_lora_adapter_from_tensors",),
    wrapper=on_tensors,
    contract=Contract(
        params=("recv_req",),
        mentions=("self.model_runner.load_lora_adapter_from_tensors", "recv_req.to_ref"),
        exists=(
            f"{MANAGER}.create_lora_update_result",
            "sglang.srt.lora.lora:LoRAAdapter._process_weight",
            "sglang.srt.lora.layers:FusedMoEWithLoRA",
            "sglang.srt.managers.io_struct:LoadLoRAAdapterFromTensorsReqInput.to_ref",
        ),
    ),
)

UNLOAD = _patch(
    id="fp8.sglang_lora.unload_lora_adapter",
    targets=(f"{WORKER}.unload_lora_adapter",),
    wrapper=on_unload,
    contract=Contract(params=("recv_req",), mentions=("self.model_runner.unload_lora_adapter",)),
    why="The account of adapters must lose one that is unloaded.",
    how="Notes it after SGLang has.",
)
