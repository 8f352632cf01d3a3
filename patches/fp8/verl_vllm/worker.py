"""Receive a weight update in the rollout worker: raise a failed one with rank and traceback, return a receipt of a finished one."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches._shared.context import timed
from flashpatch.patches.fp8 import model_registry, stated
from flashpatch.patches.fp8.verl.transfer.weight_sync import (
    TICKET,
    WEIGHT_SYNC,
    Receiving,
    job_socket_name,
    traceback_text,
)
from flashpatch.patches.fp8.vllm import reload
from flashpatch.patches.fp8.vllm_lora import worker_manager

if TYPE_CHECKING:
    from flashpatch.arming.site import Site

QUANTIZED = "verl.utils.vllm.vllm_quant_utils"
EXTENSION = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension"
RECEIVER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver"
_SENT = "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.async_send_weights"
_STOCK_END = "verl ends every update with vLLM's process_weights_after_loading."

patches = Patches(
    "fp8",
    "verl>=0.9",
    framework="verl_vllm",
    scope="worker",
    evidence="optional",
    remove_when="verl's transfer polls, watches its peer and carries errors in-band.",
)


@patches.wrap(
    f"{EXTENSION}.update_weights_from_ipc",
    relies_on=("BucketedWeightReceiver", "process_weights_after_loading", f"{EXTENSION}._iter_all_models"),
    params=("peft_config", "base_sync_done", "use_shm"),
    when=_SENT,
    needs="fp8.vllm.initialize_model",
    why="vLLM passes a worker's exception on as one line, and its success as nothing.",
    remove_when="verl's update answers with the version that each worker committed.",
)
def update_weights_from_ipc(original, self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Put the traceback into the message, and answer with what was committed and what it took.

    Returns:
        The receipt, of plain values: ``id`` and ``step`` of the sync; ``rank``, ``world``, ``host``, ``pid``;
        ``before`` and ``after``, the policy version of each model that verl updates; ``states``; ``adapter``,
        whether only LoRA adapters came; ``retry``, whether the update before failed; seconds ``receive``,
        ``load`` (part of it) and ``process`` (before and after it); ``bytes`` and ``tensors``; ``checksums`` of
        the weights per model, if the option verify_commit asks for them; ``errors``, the relative error with
        which each quantized layer was rounded; ``wide``, see `model_registry.wide_names`; ``adapters``, name to digest of
        the LoRA adapters that the worker holds, None if they are not followed.

    Raises:
        PatchError: the update failed; the message holds the whole traceback, as vLLM passes on nothing else."""
    receiving = Receiving(kwargs.pop(TICKET, None) or {})
    models = _updated(self)
    before, began = [model.version for model in models], time.perf_counter()
    adapter = bool(kwargs.get("peft_config") and kwargs.get("base_sync_done"))
    try:
        with (
            stated.update([] if adapter else models),
            WEIGHT_SYNC.in_receiving(receiving),
            worker_manager.kept_until_replaced(self.model_runner) as adapters,
        ):
            original(self, *args, **kwargs)
    except Exception as error:
        WEIGHT_SYNC.failed = True
        raise PatchError(
            f"rollout worker {self.rank} (process {os.getpid()}) failed in a weight update:\n{traceback_text(error)}\n",
            patch=patches.of(update_weights_from_ipc).id,
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
        "adapter": adapter,
        "adapters": None if adapters is None else adapters.digests(),
        "retry": retry,
        "receive": receiving.receive,
        "load": receiving.load,
        "process": seconds - receiving.receive,
        "bytes": receiving.bytes,
        "tensors": receiving.tensors,
        "checksums": _checksums(self, models),
        "wide": model_registry.wide_names(model.wide for model in models),
    }


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
    return [one for one in map(model_registry.get, worker._iter_all_models()) if one is not None]


@patches.wrap(
    f"{QUANTIZED}:prepare_quanted_weights_for_loading",
    relies_on="stage_fp8_params_for_loading",
    when="called=fp8.verl_vllm.process_quanted_weights_after_loading",
    why="For an engine on an fp8 checkpoint verl puts staging tensors in the place of live ones, beside the update's own.",
    remove_when=_STOCK_END,
)
def prepare_quanted_weights_for_loading(original, model: Any) -> dict[str, Any]:
    """Leave models whose weights FlashPatch updates to the update, which stages its own layers."""
    return original(model) if model_registry.get(model) is None else {}


@patches.wrap(
    f"{QUANTIZED}:process_quanted_weights_after_loading",
    relies_on="process_fp8_weights_after_loading",
    when="called=fp8.verl_vllm.prepare_quanted_weights_for_loading",
    why="For an engine on an fp8 checkpoint verl does not end an update with vLLM's function, so it would stay open.",
    remove_when=_STOCK_END,
)
def process_quanted_weights_after_loading(original, model: Any, reload_state: Any) -> None:
    """Commit the update, or raise with the names of what did not come."""
    managed = model_registry.get(model)
    if managed is None:
        original(model, reload_state)
    else:
        reload.finish(managed)


@patches.wrap(
    f"{RECEIVER}.receive_weights",
    relies_on=("self._init_socket", "self._init_buffer", "self._cleanup", "self._ack_pending"),
    when="called=fp8.verl_vllm.update_weights_from_ipc",
    why="An exception while weights are loaded leaves views of the shared memory behind, and closing it fails.",
)
def receive_weights(original, self, on_bucket_received: Callable, *args: Any, **kwargs: Any) -> Any:
    """Time the loading, and after a failure clear the frames that hold views before memory is closed."""
    receiving = WEIGHT_SYNC.receiving or Receiving()

    def load(weights: list[tuple[str, Any]], *rest: Any, **more: Any) -> Any:
        receiving.tensors += len(weights)
        receiving.bytes += sum(tensor.nbytes for _, tensor in weights)
        with timed(receiving, "load"):
            return on_bucket_received(weights, *rest, **more)

    with timed(receiving, "receive"):
        try:
            return original(self, *args, on_bucket_received=load, **kwargs)
        except BaseException as error:
            _release(self, error)
            raise


def _release(receiver: Any, error: BaseException) -> None:
    """Clear the frames of a failure, then close the shared memory that they held."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    shm = receiver.__dict__.pop("_flashpatch_shm", None)
    if shm is not None:
        with suppress(BufferError):  # another object holds a view and frees the memory later
            shm.close()


@patches.wrap(
    f"{RECEIVER}._init_socket",
    relies_on=("self.socket", "self.zmq_handle"),
    when="called=fp8.verl_vllm.receive_weights",
    why="The receiver blocks for ever in recv when the trainer failed or died, and its engine with it.",
)
def receiver_init_socket(original, self) -> None:
    """Make a socket, of the name that the sender's ticket implies, that polls, watches the connection and the sending process,
    and raises their errors."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    receiving = WEIGHT_SYNC.receiving
    if receiving is not None and receiving.ticket:
        self.zmq_handle = job_socket_name(self.zmq_handle, receiving.ticket["run"])
    original(self)

    def check_sender() -> None:
        """Raise when the sending process has ended, also before it has ever connected."""
        if receiving is not None and receiving.sender_gone():
            raise PatchError(
                f"the trainer that sends the weights has ended (process {receiving.ticket['pid']}).",
                patch=patches.of(receiver_init_socket).id,
                advice="Look for its end in the job's log.",
            )

    self.socket = PeerSocket(
        self.socket,
        patch=patches.of(receiver_init_socket).id,
        peer="the trainer that sends the weights",
        timeout=engine.options("fp8")["transfer_timeout"],
        check_peer=check_sender,
    )


@patches.wrap(
    f"{RECEIVER}._cleanup",
    relies_on=("self.socket", "self.shm", "self._ack_pending"),
    evidence="update",
    when="called=fp8.verl_vllm.receive_weights",
    why="After an exception the sender gets no answer and waits for ever; the error that can be seen, "
    "'cannot close exported pointers exist', hides the real one.",
)
def receiver_cleanup(original, self) -> None:
    """Answer with the traceback as text, and leave the shared memory open until its views are gone.

    While the exception travels, frames hold views of the shared memory, and verl's attempt to close it would
    raise in the exception's place. Closing waits for `receive_weights`."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    guard, error = self.socket, sys.exc_info()[1]
    if not isinstance(guard, PeerSocket):
        return original(self)
    try:
        if not self._ack_pending:
            guard.fail(traceback_text(error) if error else "the transfer ended early")
            self._flashpatch_shm, self.shm = self.shm, None
        return original(self)
    except BaseException as problem:
        guard.fail(traceback_text(problem))
        raise
    finally:
        if not guard.closed:
            guard.close()


_OLD, _NEW = "get_unstacked_mapper", "get_rename_mapper"


@patches.register(
    "verl.utils.vllm.utils:VLLMHijack.hijack",
    relies_on=(f"hf_to_vllm_mapper.{_OLD}", "vllm.model_executor.models.utils:WeightsMapper"),
    why="verl 0.9.1 calls get_unstacked_mapper for an adapter's tensors, which vLLM has renamed: each LoRA sync fails.",
    remove_when="verl calls get_rename_mapper.",
)
def hijack(site: Site) -> Callable[[], None]:
    """Give the function of vLLM that verl calls for an adapter's tensors its old name too."""

    def call(original) -> None:
        mapper = _mapper()
        if not hasattr(mapper, _OLD) and hasattr(mapper, _NEW):
            setattr(mapper, _OLD, getattr(mapper, _NEW))
        return original()

    def take_away() -> None:
        mapper = _mapper()
        if _OLD in vars(mapper) and vars(mapper)[_OLD] is vars(mapper).get(_NEW):
            delattr(mapper, _OLD)
        site.unwrap()

    site.wrap(call)
    return take_away


def _mapper() -> Any:
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper
