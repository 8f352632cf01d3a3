"""Raise a failed update with rank and traceback; return a receipt of a finished one."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches.fp8.refit import model_registry, wide_weights
from flashpatch.patches.fp8.verl.transfer.sync_calls import TICKET, Receiving, traceback_text
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.patches.fp8.vllm import reload
from flashpatch.patches.fp8.vllm_lora import worker_manager
from flashpatch.record import Contract, Patch

QUANTIZED = "verl.utils.vllm.vllm_quant_utils"
EXTENSION = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension"
ID = "fp8.verl_vllm.update_weights_from_ipc"


def on_update(original, self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Around ``update_weights_from_ipc``.

    Returns:
        The receipt, of plain values: ``id`` and ``step`` of the sync; ``rank``, ``world``, ``host``, ``pid``;
        ``before`` and ``after``, the policy version of each model that verl updates; ``states``; ``adapter``,
        whether only LoRA adapters came; ``retry``, whether the update before failed; seconds ``receive``,
        ``load`` (part of it) and ``process`` (before and after it); ``bytes`` and ``tensors``; ``checksums`` of
        the weights per model, if the option verify_commit asks for them; ``errors``, the
        relative error with which each quantized layer was rounded; ``wide``, see `wide_weights.of`; ``adapters``, name to digest of the LoRA adapters
        that the worker holds, None if they are not followed.

    Raises:
        PatchError: the update failed; the message holds the whole traceback, as vLLM passes on nothing else.
    """
    receiving = Receiving(kwargs.pop(TICKET, None) or {})
    models = _updated(self)
    before, began = [model.version for model in models], time.perf_counter()
    try:
        with (
            WEIGHT_SYNC.in_receiving(receiving),
            worker_manager.kept_until_replaced(self.model_runner) as adapters,
        ):
            original(self, *args, **kwargs)
    except Exception as error:
        WEIGHT_SYNC.failed = True
        raise PatchError(
            f"rollout worker {self.rank} (process {os.getpid()}) failed in a weight update:\n{traceback_text(error)}\n",
            patch=ID,
            advice="Mend what its traceback says; nothing was committed.",
        ) from error
    seconds = time.perf_counter() - began
    retry, WEIGHT_SYNC.failed = WEIGHT_SYNC.failed, False
    ledger.note(sync_step=receiving.ticket.get("step"), sync_seconds=round(seconds, 4))
    ledger.event(
        "received", step=receiving.ticket.get("step"), seconds=round(seconds, 6), bytes=receiving.bytes
    )
    return {
        "id": receiving.ticket.get("id"),
        "step": receiving.ticket.get("step"),
        "rank": self.rank,
        "world": getattr(self.parallel_config, "world_size", None),
        "host": files.host(),
        "pid": os.getpid(),
        "before": before,
        "after": [model.version for model in models],
        "states": [model.state for model in models],
        "adapter": bool(kwargs.get("peft_config") and kwargs.get("base_sync_done")),
        "adapters": None if adapters is None else adapters.digests(),
        "retry": retry,
        "receive": receiving.receive,
        "load": receiving.load,
        "process": seconds - receiving.receive,
        "bytes": receiving.bytes,
        "tensors": receiving.tensors,
        "checksums": _checksums(self, models),
        "errors": {layer: error for model in models for layer, error in model.rounding_errors.items()},
        "wide": wide_weights.of(model.wide for model in models),
    }


def on_prepare(original, model: Any) -> dict[str, Any]:
    """Around ``prepare_quanted_weights_for_loading``: a model that FlashPatch updates stages its own layers."""
    return original(model) if model_registry.get(model) is None else {}


def on_process(original, model: Any, reload_state: Any) -> None:
    """Around ``process_quanted_weights_after_loading``: the end of the update."""
    managed = model_registry.get(model)
    if managed is None:
        original(model, reload_state)
    else:
        reload.finish(managed)


def _checksums(worker: Any, models: list[model_registry.ManagedModel]) -> list[str]:
    """Checksums of the live weights, and how they are stored; empty if none were asked for."""
    if not engine.options("fp8")["verify_commit"]:
        return []
    began = time.perf_counter()
    found = [f"{worker.model_config.quantization} {model.checksum()}" for model in models]
    ledger.note(weights_checksum=found, checksum_seconds=round(time.perf_counter() - began, 4))
    return found


def _updated(worker: Any) -> list[model_registry.ManagedModel]:
    """The models that verl's update is for: the policy, and a drafter only if verl brings its weights too."""
    found = [model_registry.get(model) for model in worker._iter_all_models()]
    return [model for model in found if model is not None]


PATCH = Patch(
    id=ID,
    targets=(f"{EXTENSION}.update_weights_from_ipc",),
    requires="verl>=0.9",
    wrapper=on_update,
    contract=Contract(
        params=("peft_config", "base_sync_done", "use_shm"),
        mentions=("BucketedWeightReceiver", "process_weights_after_loading"),
        exists=(f"{EXTENSION}._iter_all_models",),
    ),
    evidence="optional",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.async_send_weights",
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.initialize_model",),
    why="vLLM passes a worker's exception on as one line, and its success as nothing.",
    how="Puts the traceback into the message, and answers with what was committed and what it took.",
    remove_when="verl's update answers with the version that each worker committed.",
)

_quantized = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.async_send_weights",
    scope=frozenset({"worker"}),
    needs=("fp8.verl_vllm.update_weights_from_ipc",),
    remove_when="verl ends every update with vLLM's process_weights_after_loading.",
)

PREPARE = _quantized(
    id="fp8.verl_vllm.prepare_quanted_weights_for_loading",
    targets=(f"{QUANTIZED}:prepare_quanted_weights_for_loading",),
    wrapper=on_prepare,
    contract=Contract(params=("model",), mentions=("stage_fp8_params_for_loading",)),
    why="For an engine on an fp8 checkpoint verl puts staging tensors in the place of live ones, beside the update's own.",
    how="Leaves models whose weights FlashPatch updates to the update.",
)

PROCESS = _quantized(
    id="fp8.verl_vllm.process_quanted_weights_after_loading",
    targets=(f"{QUANTIZED}:process_quanted_weights_after_loading",),
    wrapper=on_process,
    contract=Contract(params=("model", "reload_state"), mentions=("process_fp8_weights_after_loading",)),
    why="For an engine on an fp8 checkpoint verl does not end an update with vLLM's function, so it would stay open.",
    how="Commits the update, or raises with the names of what did not come.",
)
