"""Take groups out of verl's replay buffer as they end, instead of waiting for a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import ID

PARTITION, VALIDATION = "train", "val"
EMPTY = "stream/empty_groups"


def take(buffer: Any, step: int, at_most: int, dropped: dict[str, Any]) -> Any:
    """Take the groups that have ended, without waiting.

    Groups that verl's own rules drop (too old, without a signal, failed) are dropped and refilled here too, and counted
    under verl's names; those of which no agent loop gave an output count under `EMPTY`.

    Args:
        buffer: verl's ``ReplayBufferAsync`` or a subclass.
        step: number of the training step.
        at_most: largest number of groups.
        dropped: verl's metrics of what was dropped in this step; gets those of this call.

    Returns:
        verl's ``KVBatchMeta`` of their samples, oldest prompts first, without a key if there is none."""
    from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics

    buffer._sync_metadata_from_transfer_queue()
    reasons = buffer._terminal_eviction_reasons(step, PARTITION)
    evicted, stale, _, metrics = buffer._evict_terminal_groups(step, PARTITION, reasons)
    if evicted:
        _accumulate_eviction_metrics(dropped, metrics, stale)
    ready = buffer._sampleable_terminal_keys(PARTITION, reasons)
    empty = ready - {key.split("_")[0] for key in buffer.partitions[PARTITION]}
    buffer._clear_groups(PARTITION, empty)
    dropped[EMPTY] = dropped.get(EMPTY, 0) + len(empty)
    if buffer.refill_fn is not None and evicted | empty:
        buffer.refill_fn(len(evicted | empty))
    ready -= empty
    if not buffer._has_enough_samples(step, PARTITION, 0, ready):
        ready = set()  # verl's max_off_policy_strategy=wait: a prompt in flight must end first
    uids, known, _ = buffer._select_prompt_uids(PARTITION, ready, at_most)
    return _samples(buffer, uids, known)


def in_flight(buffer: Any, partition: str = PARTITION) -> set[str]:
    """Return the groups that are being generated or wait for it, as of the buffer's last look into the queue."""
    return buffer.pending_keys[partition] | buffer.running_keys[partition]


def at_each_look(buffer: Any, call: Callable[[], Any]) -> None:
    """Call a function after each look of the buffer into the queue, also in verl's own loop, which validation waits in."""
    look = buffer._sync_metadata_from_transfer_queue

    def look_and_call() -> None:
        look()
        call()

    buffer._sync_metadata_from_transfer_queue = look_and_call


def refuse_others() -> None:
    """Raise PatchError if verl's queue, of which a Ray cluster has one, is another job's; that job keeps it."""
    import ray
    from transfer_queue import interface

    if interface._TQ_CONTROLLER._actor_id.job_id.hex() != ray.get_runtime_context().get_job_id():
        interface._TQ_CONTROLLER = None  # else verl would end it with this job
        raise PatchError(
            "cannot train beside another job of this Ray cluster, which has one queue for all.",
            patch=ID,
            target="transfer_queue.interface:init",
            advice="Start a Ray cluster for each job, or the second one when the first has ended.",
        )


def clear_trained() -> int:
    """Remove samples whose group has been taken already, which verl's checkpoints still hold; return their number."""
    import transfer_queue as tq

    known = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    prompts = {key for key, tag in known.items() if tag.get("is_prompt")}
    gone = [key for key, tag in known.items() if key not in prompts and key.split("_")[0] not in prompts]
    if gone:
        tq.kv_clear(keys=gone, partition_id=PARTITION)
    return len(gone)


def uids(batch: Any) -> set[str]:
    """Return the groups of a ``KVBatchMeta``'s samples."""
    return {key.split("_")[0] for key in batch.keys}


def drop(batch: Any, groups: set[str]) -> Any:
    """Remove groups that have been taken from the queue; return the ``KVBatchMeta`` of the others."""
    import transfer_queue as tq

    tq.kv_clear(keys=[key for key in batch.keys if key.split("_")[0] in groups], partition_id=PARTITION)
    kept = [
        (key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if key.split("_")[0] not in groups
    ]
    return tq.KVBatchMeta(
        partition_id=PARTITION, keys=[key for key, _ in kept], tags=[tag for _, tag in kept]
    )


def _samples(buffer: Any, uids: list[str], known: dict[str, dict]) -> Any:
    from transfer_queue import KVBatchMeta

    if not uids:
        return KVBatchMeta(partition_id=PARTITION, keys=[], tags=[])
    return buffer._materialize_batch(PARTITION, uids, known)
