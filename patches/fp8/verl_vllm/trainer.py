"""Follow a weight sync in the trainer: give it an id, guard the sender's socket, and keep the receipt."""

from __future__ import annotations

import sys
import time
from collections.abc import Coroutine
from multiprocessing import shared_memory
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches._shared.context import timed
from flashpatch.patches.fp8.verl import adapters
from flashpatch.patches.fp8.verl.transfer import receipts
from flashpatch.patches.fp8.verl.transfer.weight_sync import (
    TICKET,
    WEIGHT_SYNC,
    Sending,
    job_socket_name,
    relayed,
    traceback_text,
)

ADAPTER = "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter"
SENDER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender"
RECEIVE = "update_weights_from_ipc"
"""verl's name of the workers' end of a sync."""

_EARLY = 5.0  # seconds between the end of the workers' call and an error, while their last answer is read
_CONNECT_TIMEOUT = 5.0  # seconds to wait for a worker that has not connected yet, to report a failure to it
_ANSWERS = "verl's update returns what each worker committed and raises when a worker fails."

patches = Patches(
    "fp8",
    "verl>=0.9",
    framework="verl_vllm",
    evidence="optional",  # some trainers send nothing, such as a critic; the driver asks all that should
    scope="trainer",
    remove_when="verl's transfer polls, watches its peer and carries errors in-band.",
)


@patches.wrap(
    f"{ADAPTER}.update_weights",
    relies_on=("self._execute_method", "BucketedWeightSender"),
    params=("weights", "global_steps"),
    evidence="update",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.launch_servers",
    why="verl does not know which policy a replica holds after a sync.",
    remove_when=_ANSWERS,
)
def server_adapter_update_weights(original, self, weights: Any, *args: Any, **kwargs: Any) -> Coroutine:
    """Keep the receipts of the replica's workers, and what the transfer took, until the driver asks.

    verl's decorator hides that its method is a coroutine function. Raises PatchError if the trainer has LoRA adapters,
    and none comes, or no base for an engine without one."""
    return _update_parts(original, self, weights, args, kwargs)


async def _update_parts(original, self, weights: Any, args: tuple, kwargs: dict) -> Any:
    """Update once, or with a stream of a base and an adapter once for each."""
    result, patch = None, patches.of(server_adapter_update_weights)
    async for part, told in adapters.parts(self, weights, kwargs, patch):
        result = await _update(original, self, part, args, told)
    return result


async def _update(original, self, weights: Any, args: tuple, kwargs: dict) -> Any:
    step = kwargs.get("global_steps", args[0] if args else None)
    sending = WEIGHT_SYNC.begin(step)
    sending.ticketed = kwargs.get("wire_format", "named_tensors") == "named_tensors"
    began = time.perf_counter()
    with WEIGHT_SYNC.in_sending(sending):
        result = await original(self, weights, *args, **kwargs)
        workers = await sending.call if sending.call is not None else None
    if sending.ticketed:  # others leave no receipts
        seconds = time.perf_counter() - began
        called = sending.call is not None
        receipt = receipts.receipt(sending, self.replica_rank, self.rollout_rank, workers, seconds, called)
    else:  # the workers commit by another way, which is not checked
        receipt = {"step": sending.step, "id": sending.id, "judged": False}
    WEIGHT_SYNC.keep_receipt(receipt)
    if not relayed(weights):
        ledger.role("trainer")
    ledger.note(sync_step=sending.step, sync_seconds=round(sending.send, 4))
    ledger.event("sent", step=sending.step, seconds=round(sending.send, 6), bytes=sending.bytes)
    return result


@patches.wrap(
    f"{ADAPTER}._execute_method",
    relies_on="collective_rpc",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.server_adapter_update_weights",
    why="A worker that fails before it connects fails in a call that is read only after the transfer.",
    remove_when=_ANSWERS,
)
async def execute_method(
    original,
    self,
    method: Any,
    non_block: bool = False,
    timeout: Any = None,
    args: tuple = (),
    kwargs: Any = None,
) -> Any:
    """Add the ticket to the workers' call, and pass it on, running, to the sender's socket, which checks it while waiting."""
    sending = WEIGHT_SYNC.sending
    if sending is not None and method == RECEIVE:
        kwargs = {**(kwargs or {}), TICKET: sending.ticket()}
    result = await original(self, method, non_block=non_block, timeout=timeout, args=args, kwargs=kwargs)
    if sending is not None and non_block and result is not None:
        sending.future = result.future()
        sending.call = result if method == RECEIVE else None
    return result


@patches.wrap(
    f"{SENDER}.async_send_weights",
    relies_on=("self._init_socket", "self._init_buffer", "self._cleanup"),
    when="called=fp8.verl_vllm.server_adapter_update_weights",
    why="verl does not show how long the parts of a sync take.",
)
async def async_send_weights(original, self, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Count and time the generator of weights."""
    sending = WEIGHT_SYNC.sending or Sending()
    with timed(sending, "send"):
        return await original(self, sending.timed(weights), *args, **kwargs)


@patches.wrap(
    f"{SENDER}._init_socket",
    relies_on=("self.socket", "self.zmq_handle"),
    when="called=fp8.verl_vllm.async_send_weights",
    why="The sender blocks for ever in recv when the rollout worker failed, died, or never came. Two jobs on one "
    "host that each start a Ray of their own use the same socket, and exchange weights.",
)
def sender_init_socket(original, self) -> None:
    """Make a socket of this job's own name that polls, watches the connection and the call to the workers, and raises their
    errors."""
    from flashpatch.patches.fp8.verl_vllm.peer_socket import PeerSocket

    sending = WEIGHT_SYNC.sending
    if sending is not None and sending.ticketed:
        self.zmq_handle = job_socket_name(self.zmq_handle, files.run_id())
    original(self)
    self.socket = PeerSocket(
        self.socket,
        patch=patches.of(sender_init_socket).id,
        peer="the rollout worker that receives the weights",
        timeout=engine.options("fp8")["transfer_timeout"],
        check_peer=_CallCheck(sending),
    )


class _CallCheck:
    """Raise when the call that makes the workers receive has ended: no answer will come."""

    def __init__(self, sending: Sending | None) -> None:
        self._sending = sending
        self._ended: float | None = None

    def __call__(self) -> None:
        future = self._sending.future if self._sending else None
        if future is None or not future.done():
            return
        error = future.exception()
        if error is not None:
            raise PatchError(
                f"the rollout engine could not take the weights:\n{error}\n",
                patch=patches.of(sender_init_socket).id,
                advice="Mend what the error says; nothing was committed.",
            ) from error
        self._ended = self._ended or time.monotonic()
        if time.monotonic() - self._ended > _EARLY:
            raise PatchError(
                "the rollout engine's call ended before all weights were taken.",
                patch=patches.of(sender_init_socket).id,
                advice="Look at the log of the rollout server.",
            )


@patches.wrap(
    f"{SENDER}._cleanup",
    relies_on=("self.socket", "self.shm"),
    evidence="update",
    when="called=fp8.verl_vllm.async_send_weights",
    why="A sender whose generator raises leaves the rollout worker waiting, and the engine with it.",
)
def sender_cleanup(original, self) -> None:
    """Send the traceback of an incomplete transfer as text before the socket is closed."""
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
        # a dead worker's resource tracker removed it first; the earlier error is the one to report
        self.shm = None
    finally:
        if early:
            _unlink(early)


def _unlink(name: str) -> None:
    """Free shared memory that verl has offered but not stored on the sender yet."""
    try:
        shm = shared_memory.SharedMemory(name=name)
    except FileNotFoundError:
        return
    shm.close()
    shm.unlink()
