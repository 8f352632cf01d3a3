"""The trainer's end of verl's weight transfer: it hears of failures, and tells its own."""

from __future__ import annotations

import sys
import time
from multiprocessing import shared_memory
from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches.fp8.verl.transfer.weight_sync import SENDING, Sending, private, trace
from flashpatch.record import Contract, Patch

SENDER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender"
ID = "fp8.verl.sender_init_socket"
_EARLY = 5.0  # seconds by which the workers' call may end before their last answer is read here
_PATIENCE = 5.0  # seconds that a failure waits for a worker which has yet to connect


async def on_send(original, self, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``async_send_weights``: the weights are counted and timed."""
    sending = SENDING.get() or Sending()
    began = time.perf_counter()
    try:
        return await original(self, sending.timed(weights), *args, **kwargs)
    finally:
        sending.send += time.perf_counter() - began


def on_socket(original, self) -> None:
    """Around ``_init_socket``: a guard takes the socket's place, under a name that is this job's alone."""
    from flashpatch.patches.fp8.verl.transfer.peer_socket import Guard

    sending = SENDING.get()
    if sending is not None and sending.ticketed:
        self.zmq_handle = private(self.zmq_handle, files.run_id())
    original(self)
    self.socket = Guard(
        self.socket,
        patch=ID,
        peer="the rollout worker that receives the weights",
        limit=engine.options("fp8")["transfer_timeout"],
        look=_Look(sending),
    )


def on_cleanup(original, self) -> None:
    """Around ``_cleanup``: when the transfer is not complete, the receiver is told why."""
    from flashpatch.patches.fp8.verl.transfer.peer_socket import Guard

    guard, error = self.socket, sys.exc_info()[1]
    if isinstance(guard, Guard):
        if (sending := SENDING.get()) is not None:
            sending.waited += guard.waited
        if not guard.complete:
            guard.fail(trace(error) if error else "the transfer ended early", _PATIENCE)
    early = None if self.shm is not None or guard is None else getattr(guard, "announced", None)
    try:
        original(self)
    except FileNotFoundError:
        if error is None:
            raise
        self.shm = None  # a dead worker's resource tracker removed it first; what happened before is the news
    finally:
        if early:
            _unlink(early)


class _Look:
    """Asks the call that makes the workers receive: if it ended, no answer will come."""

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
                f"the rollout engine could not take the weights:\n{error}\n", patch=ID
            ) from error
        self._ended = self._ended or time.monotonic()
        if time.monotonic() - self._ended > _EARLY:
            raise PatchError("the rollout engine's call ended before all weights were taken.", patch=ID)


def _unlink(name: str) -> None:
    """Free shared memory that verl has announced but not yet kept."""
    try:
        shm = shared_memory.SharedMemory(name=name)
    except FileNotFoundError:
        return
    shm.close()
    shm.unlink()


_COMMON = dict(
    requires="verl>=0.9",
    evidence="optional",  # some trainers send nothing, such as a critic; the driver asks all that should
    scope=frozenset({"trainer"}),
    tested=("0.9.1",),
    remove_when="verl's transfer polls, watches its peer and carries errors in-band.",
)

SEND = Patch(
    id="fp8.verl.async_send_weights",
    targets=(f"{SENDER}.async_send_weights",),
    wrapper=on_send,
    contract=Contract(
        params=("weights",), mentions=("self._init_socket", "self._init_buffer", "self._cleanup")
    ),
    why="How long a sync takes, and where, is invisible.",
    how="Counts and times the generator of weights.",
    **_COMMON,
)

SOCKET = Patch(
    id=ID,
    targets=(f"{SENDER}._init_socket",),
    wrapper=on_socket,
    contract=Contract(mentions=("self.socket", "self.zmq_handle")),
    needs=("fp8.verl.sender_cleanup",),
    why="The sender blocks for ever in recv when the rollout worker failed, died, or never came. Two jobs on one "
    "host that each start a Ray of their own use the same socket, and exchange weights.",
    how="A socket of this job's own name that polls, watches the connection and the call to the workers, and "
    "raises what they say.",
    **_COMMON,
)

CLEANUP = Patch(
    id="fp8.verl.sender_cleanup",
    targets=(f"{SENDER}._cleanup",),
    wrapper=on_cleanup,
    contract=Contract(mentions=("self.socket", "self.shm")),
    why="A sender whose generator raises leaves the rollout worker waiting, and the engine with it.",
    how="Sends the traceback as text before the socket is closed.",
    **_COMMON,
)
