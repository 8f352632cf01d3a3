"""Give each sync of the trainer's server client an id, and keep its receipt."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from flashpatch import ledger
from flashpatch.patches.fp8.verl import adapters
from flashpatch.patches.fp8.verl.transfer import receipts
from flashpatch.patches.fp8.verl.transfer.sync_calls import TICKET, relayed
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.record import Contract, Patch

ADAPTER = "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter"
RECEIVE = "update_weights_from_ipc"
"""verl's name of the workers' end of a sync."""


def on_update(original, self, weights: Any, *args: Any, **kwargs: Any) -> Coroutine:
    """Around ``update_weights``, whose decorator hides that it is a coroutine function.

    Raises:
        PatchError: the trainer has LoRA adapters, and none comes, or no base for an engine without one.
    """
    return _update_parts(original, self, weights, args, kwargs)


async def _update_parts(original, self, weights: Any, args: tuple, kwargs: dict) -> Any:
    """Update once, or with a stream of a base and an adapter once for each."""
    result = None
    async for part, told in adapters.parts(self, weights, kwargs, UPDATE):
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
    else:
        receipt = receipts.unjudged_receipt(sending)
    WEIGHT_SYNC.keep_receipt(receipt)
    if not relayed(weights):
        ledger.role("trainer")
    ledger.note(sync_step=sending.step, sync_seconds=round(sending.send, 4))
    ledger.event("sent", step=sending.step, seconds=round(sending.send, 6), bytes=sending.bytes)
    return result


async def on_execute(
    original,
    self,
    method: Any,
    non_block: bool = False,
    timeout: Any = None,
    args: tuple = (),
    kwargs: Any = None,
) -> Any:
    """Around ``_execute_method``: add the ticket to the workers' call, and keep its future."""
    sending = WEIGHT_SYNC.sending
    if sending is not None and method == RECEIVE:
        kwargs = {**(kwargs or {}), TICKET: sending.ticket()}
    result = await original(self, method, non_block=non_block, timeout=timeout, args=args, kwargs=kwargs)
    if sending is not None and non_block and result is not None:
        sending.future = result.future()
        sending.call = result if method == RECEIVE else None
    return result


_patch = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",  # some trainers send nothing, such as a critic; the driver asks all that should
    scope=frozenset({"trainer"}),
    remove_when="verl's update returns what each worker committed and raises when a worker fails.",
)

UPDATE = _patch(
    id="fp8.verl_vllm.server_adapter_update_weights",
    evidence="update",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.launch_servers",
    targets=(f"{ADAPTER}.update_weights",),
    wrapper=on_update,
    contract=Contract(
        params=("weights", "global_steps"), mentions=("self._execute_method", "BucketedWeightSender")
    ),
    needs=(
        "fp8.verl_vllm.execute_method",
        "fp8.verl_vllm.collective_rpc",
        "fp8.verl_vllm.update_weights_from_ipc",
    ),
    why="verl does not know which policy a replica holds after a sync.",
    how="Keeps the receipts of the replica's workers, and what the transfer took, until the driver asks.",
)

EXECUTE = _patch(
    id="fp8.verl_vllm.execute_method",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.server_adapter_update_weights",
    targets=(f"{ADAPTER}._execute_method",),
    wrapper=on_execute,
    contract=Contract(
        params=("method", "non_block", "timeout", "args", "kwargs"), mentions=("collective_rpc",)
    ),
    why="A worker that fails before it connects fails in a call that is read only after the transfer.",
    how="Passes the running call to the sender's socket, which checks it while waiting.",
)
