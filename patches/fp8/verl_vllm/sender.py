"""Exchange failures at the trainer's end of verl's weight transfer."""

from __future__ import annotations

import sys
import time
from functools import partial
from multiprocessing import shared_memory
from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches.fp8.verl.transfer.sync_calls import Sending, job_socket_name, traceback_text
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.record import Contract, Patch

SENDER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender"
ID = "fp8.verl_vllm.sender_init_socket"
_EARLY = 5.0  # seconds between the end of the workers' call and an error, while their last answer is read
_CONNECT_TIMEOUT = 5.0  # seconds to wait for a worker that has not connected yet, to report a failure to it


async def on_send(original, self, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``async_send_weights``: count and time the weights."""
    sending = WEIGHT_SYNC.sending or Sending()
    began = time.perf_counter()
    try:
        return await original(self, sending.timed(weights), *args, **kwargs)
    finally:
        sending.send += time.perf_counter() - began


def on_socket(original, self) -> None:
    """Around ``_init_socket``: guard the socket, and give it a name that only this job uses."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    sending = WEIGHT_SYNC.sending
    if sending is not None and sending.ticketed:
        self.zmq_handle = job_socket_name(self.zmq_handle, files.run_id())
    original(self)
    self.socket = PeerSocket(
        self.socket,
        patch=ID,
        peer="the rollout worker that receives the weights",
        timeout=engine.options("fp8")["transfer_timeout"],
        check_peer=_CallCheck(sending),
    )


def on_cleanup(original, self) -> None:
    """Around ``_cleanup``: report to the receiver why an incomplete transfer ended."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    guard, error = self.socket, sys.exc_info()[1]
    if isinstance(guard, PeerSocket):
        if (sending := WEIGHT_SYNC.sending) is not None:
            sending.waited += guard.waited
        if not guard.complete:
            guard.fail(traceback_text(error) if error else "the transfer ended early", _CONNECT_TIMEOUT)
    early = None if self.shm is not None or guard is None else getattr(guard, "announced", None)
    try:
        original(self)
    except FileNotFoundError:
        if error is None:
            raise
        self.shm = (
            None  # a dead worker's resource tracker removed it first; the earlier error is the one to report
        )
    finally:
        if early:
            _unlink(early)


class _CallCheck:
    """Raise when the call that makes the workers receive has ended: no answer will come."""

    def __init__(self, sending: Sending | None) -> None:
        self._sending = sending
        self._ended: float | None = None

    def __call__(self, lost: float | None) -> None:
        future = self._sending.future if self._sending else None
        if future is None or not future.done():
            return
        error = future.exception()
        if error is not None:
            raise PatchError(
                f"the rollout engine could not take the weights:\n{error}\n",
                patch=ID,
                advice="Mend what the error says; nothing was committed.",
            ) from error
        self._ended = self._ended or time.monotonic()
        if time.monotonic() - self._ended > _EARLY:
            raise PatchError(
                "the rollout engine's call ended before all weights were taken.",
                patch=ID,
                advice="Look at the log of the rollout server.",
            )


def _unlink(name: str) -> None:
    """Free shared memory that verl has offered but not stored on the sender yet."""
    try:
        shm = shared_memory.SharedMemory(name=name)
    except FileNotFoundError:
        return
    shm.close()
    shm.unlink()


_patch = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",  # some trainers send nothing, such as a critic; the driver asks all that should
    scope=frozenset({"trainer"}),
    remove_when="verl's transfer polls, watches its peer and carries errors in-band.",
)

SEND = _patch(
    id="fp8.verl_vllm.async_send_weights",
    when="called=fp8.verl_vllm.server_adapter_update_weights",
    targets=(f"{SENDER}.async_send_weights",),
    wrapper=on_send,
    contract=Contract(
        params=("weights",), mentions=("self._init_socket", "self._init_buffer", "self._cleanup")
    ),
    why="verl does not show how long the parts of a sync take.",
    how="Counts and times the generator of weights.",
)

SOCKET = _patch(
    id=ID,
    when="called=fp8.verl_vllm.async_send_weights",
    targets=(f"{SENDER}._init_socket",),
    wrapper=on_socket,
    contract=Contract(mentions=("self.socket", "self.zmq_handle")),
    needs=("fp8.verl_vllm.sender_cleanup",),
    why="The sender blocks for ever in recv when the rollout worker failed, died, or never came. Two jobs on one "
    "host that each start a Ray of their own use the same socket, and exchange weights.",
    how="A socket of this job's own name that polls, watches the connection and the call to the workers, and "
    "raises their errors.",
)

CLEANUP = _patch(
    id="fp8.verl_vllm.sender_cleanup",
    evidence="update",
    when="called=fp8.verl_vllm.async_send_weights",
    targets=(f"{SENDER}._cleanup",),
    wrapper=on_cleanup,
    contract=Contract(mentions=("self.socket", "self.shm")),
    why="A sender whose generator raises leaves the rollout worker waiting, and the engine with it.",
    how="Sends the traceback as text before the socket is closed.",
)
