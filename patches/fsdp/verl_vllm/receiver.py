"""Check received weights before they are quantized or loaded: the audit in verl's worker of vLLM."""

from __future__ import annotations

from typing import Any

from flashpatch import engine, ledger
from flashpatch.patches.fsdp.arrival import Arrival
from flashpatch.record import Contract, Patch

ID = "fsdp.verl_vllm.receive_weights"
MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
TARGET = f"{MODULE}:BucketedWeightReceiver.receive_weights"


def on_receive(original, self, on_bucket_received: Any, *args: Any, **kwargs: Any) -> Any:
    """Fingerprint each bucket before ``BucketedWeightReceiver.receive_weights`` loads it.

    The last one, and with it the update, is not loaded when something is wrong.

    Raises:
        PatchError: by option, something else arrived than the trainer's shards say. Always: the trainer's
            process has no fingerprints to offer, or sends some that this process did not ask for.
    """
    ledger.role("worker")
    with Arrival(engine.options("fsdp")["audit"], ID, TARGET) as arrival:

        def on_bucket(weights: Any, *rest: Any) -> Any:
            kept = arrival.takes(weights, bool(rest and rest[0]))
            try:
                return on_bucket_received(kept, *rest)
            finally:
                arrival.settles()

        result = original(self, on_bucket, *args, **kwargs)
        arrival.ends()
        return result


PATCH = Patch(
    id=ID,
    targets=(TARGET,),
    requires="verl>=0.7",
    wrapper=on_receive,
    contract=Contract(
        params=("on_bucket_received",),
        mentions=("metadata", "self.buffer", "weights"),
        exists=(f"{MODULE}:BucketedWeightReceiver", f"{MODULE}:BucketedWeightSender.async_send_weights"),
    ),
    evidence="update",
    scope=frozenset({"worker"}),
    why="A rollout engine loads whatever arrives; with wrong weights the policy trains on another's text.",
    how="Fingerprints each tensor as it arrives, whole, before it is quantized or loaded, and compares with "
    "the trainer's before the last bucket is loaded.",
    remove_when="verl checks what arrives against the trainer's shards.",
)
