"""Exchange failures at the rollout worker's end of verl's weight transfer."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.transfer.sync_calls import Receiving, job_socket_name, traceback_text
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.record import Contract, Patch

RECEIVER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver"
ID = "fp8.verl_vllm.receiver_init_socket"


def on_receive(original, self, on_bucket_received: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around ``receive_weights``: count and time it; after a failure close the shared memory."""
    receiving = WEIGHT_SYNC.receiving or Receiving()

    def timed(weights: list[tuple[str, Any]], *rest: Any, **more: Any) -> Any:
        receiving.tensors += len(weights)
        receiving.bytes += sum(tensor.nbytes for _, tensor in weights)
        began = time.perf_counter()
        try:
            return on_bucket_received(weights, *rest, **more)
        finally:
            receiving.load += time.perf_counter() - began

    began = time.perf_counter()
    try:
        return original(self, *args, on_bucket_received=timed, **kwargs)
    except BaseException as error:
        _release(self, error)
        raise
    finally:
        receiving.receive += time.perf_counter() - began


def on_socket(original, self) -> None:
    """Around ``_init_socket``: guard the socket, and give it the name that the sender's ticket implies."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    receiving = WEIGHT_SYNC.receiving
    if receiving is not None and receiving.ticket:
        self.zmq_handle = job_socket_name(self.zmq_handle, receiving.ticket["run"])
    original(self)
    self.socket = PeerSocket(
        self.socket,
        patch=ID,
        peer="the trainer that sends the weights",
        timeout=engine.options("fp8")["transfer_timeout"],
        check_peer=_SenderCheck(receiving),
    )


def on_cleanup(original, self) -> None:
    """Around ``_cleanup``: send the traceback in place of the answer that the sender waits for.

    While the exception travels, frames hold views of the shared memory, and verl's attempt to close it would
    raise in the exception's place. Closing waits for `on_receive`.
    """
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


class _SenderCheck:
    """Raise when the sending process has ended, also before it has ever connected."""

    _EVERY = 1.0

    def __init__(self, receiving: Receiving | None) -> None:
        self._receiving = receiving
        self._next = 0.0

    def __call__(self, lost: float | None) -> None:
        if self._receiving is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._EVERY
        if self._receiving.sender_gone():
            pid = self._receiving.ticket["pid"]
            raise PatchError(
                f"the trainer that sends the weights has ended (process {pid}).",
                patch=ID,
                advice="Look for its end in the job's log.",
            )


_patch = partial(
    Patch,
    requires="verl>=0.9",
    scope=frozenset({"worker"}),
    remove_when="verl's transfer polls, watches its peer and carries errors in-band.",
)

RECEIVE = _patch(
    id="fp8.verl_vllm.receive_weights",
    targets=(f"{RECEIVER}.receive_weights",),
    wrapper=on_receive,
    contract=Contract(
        params=("on_bucket_received",),
        mentions=("self._init_socket", "self._init_buffer", "self._cleanup", "self._ack_pending"),
    ),
    evidence="optional",
    when="called=fp8.verl_vllm.update_weights_from_ipc",
    needs=("fp8.verl_vllm.receiver_cleanup",),
    why="An exception while weights are loaded leaves views of the shared memory behind, and closing it fails.",
    how="Times the loading, and after a failure clears the frames that hold views before memory is closed.",
)

SOCKET = _patch(
    id=ID,
    targets=(f"{RECEIVER}._init_socket",),
    wrapper=on_socket,
    contract=Contract(mentions=("self.socket", "self.zmq_handle")),
    evidence="optional",
    when="called=fp8.verl_vllm.receive_weights",
    needs=("fp8.verl_vllm.receiver_cleanup",),
    why="The receiver blocks for ever in recv when the trainer failed or died, and its engine with it.",
    how="A socket that polls, watches the connection and the sending process, and raises their errors.",
)

CLEANUP = _patch(
    id="fp8.verl_vllm.receiver_cleanup",
    targets=(f"{RECEIVER}._cleanup",),
    wrapper=on_cleanup,
    contract=Contract(mentions=("self.socket", "self.shm", "self._ack_pending")),
    evidence="update",
    when="called=fp8.verl_vllm.receive_weights",
    needs=("fp8.verl_vllm.receive_weights",),
    why="After an exception the sender gets no answer and waits for ever; the error that can be seen, "
    "'cannot close exported pointers exist', hides the real one.",
    how="Answers with the traceback as text, and leaves the shared memory open until its views are gone.",
)
