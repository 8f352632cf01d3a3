"""Send LoRA adapters to rollouts in processes of their own, for which verl sends the base alone."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.transfer import adapter_stream
from flashpatch.patches.fp8.verl.transfer.sync_calls import relayed
from flashpatch.record import Contract, Patch

WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
ID = "fp8.verl.actor_update_weights"

_based: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainer workers that have sent the base, and clients whose engine has got the one that its adapters belong to."""


def asked(model_config: Any) -> str:
    """Return the setting that gives the trainer adapters which are not merged into what it sends; empty if none does.

    Args:
        model_config: verl's ``HFModelConfig``, or the part of the job's configuration that becomes one.
    """
    lora = model_config.get("lora") or {}
    if lora.get("merge", False):
        return ""
    if rank := lora.get("rank", 0):
        return f"lora.rank={rank}"
    return f"lora_rank={rank}" if (rank := model_config.get("lora_rank", 0)) else ""


async def parts(
    client: Any, weights: Any, told: dict[str, Any], patch: Patch
) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """Yield what each call of verl's ``ServerAdapter.update_weights`` is to get: a base and an adapter apart.

    Args:
        client: verl's ``ServerAdapter``.
        weights, told: the call's weights and keyword arguments.
        patch: named by errors.

    Raises:
        PatchError: see `check_arrival`.
    """
    if relayed(weights) and told.get("wire_format", "named_tensors") == "named_tensors":
        async for part, more in adapter_stream.Parts(weights):
            check_arrival(client, {**told, **more}, patch)
            yield part, {**told, **more}
    else:
        check_arrival(client, told, patch)
        yield weights, told


def check_arrival(client: Any, told: dict[str, Any], patch: Patch) -> None:
    """Raise unless a trainer with adapters sends them, and to an engine that has the base.

    Raises:
        PatchError: the trainer has LoRA adapters, and none comes, or no base for an engine without one.
    """
    setting = asked(client.model_config)
    if not setting:
        return
    if told.get("peft_config") is None:
        raise PatchError(
            f"the trainer has LoRA adapters ({setting}) and this sync brings none: the engine of replica "
            f"{client.replica_rank}, which lists no adapter, would draw from the first policy for ever",
            patch=patch.id,
            target=patch.targets[0].rpartition(".")[0],
            advice="Set actor_rollout_ref.model.lora.merge=True, or see why fp8.verl.actor_update_weights is not live in "
            "the trainer: flashpatch-verify --live.",
        )
    if not told.get("base_sync_done"):
        _based.add(client)
    elif "dummy" in client.config.load_format and client not in _based:
        raise PatchError(
            f"the engine of replica {client.replica_rank} was opened on dummy weights (load_format="
            f"{client.config.load_format}), and an adapter comes before any base",
            patch=patch.id,
            target=patch.targets[0].rpartition(".")[0],
            advice="Set actor_rollout_ref.rollout.load_format=auto: replicas that join later read the base from disk.",
        )


async def on_update(
    original, self, global_steps: int | None = None, mode: str = "auto", *args: Any, **kwargs: Any
) -> Any:
    """Around ``ActorRolloutRefWorker.update_weights``: send base, if it is due, and adapter with their configuration.

    Raises:
        PatchError: the checkpoint engine sends parts of changed weights, which adapters are not.
    """
    backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
    setting = asked(self.config.model)
    if backend == "naive" or not setting:
        return await original(self, global_steps, mode, *args, **kwargs)
    if backend == "delta_sharded":
        raise PatchError(
            f"the trainer has LoRA adapters ({setting}), and checkpoint_engine.backend={backend} sends changes of the base "
            "alone, so the engine would draw from the first policy",
            patch=ID,
            target=WORKER,
            advice="Choose another backend, or set actor_rollout_ref.model.lora.merge=True.",
        )
    ledger.role("trainer")
    metrics = await self.checkpoint_engine.send_weights(_stream(self), global_steps=global_steps)
    _based.add(self)
    return metrics or {}


def _stream(worker: Any) -> Iterator[tuple[str, Any]]:
    """Export the adapter, and the base if the engine was opened without it; return one marked stream, base first.

    Every rank of the trainer exports and takes all.
    """
    export, summon = worker.actor.engine.get_per_tensor_param, bool(worker.config.rollout.layered_summon)
    adapter, peft_config = export(layered_summon=summon, base_sync_done=True)
    if peft_config is None:
        raise PatchError(
            f"the trainer was asked for LoRA adapters ({asked(worker.config.model)}) and exports none",
            patch=ID,
            target=WORKER,
            advice="Set actor_rollout_ref.model.lora.merge=True, or use a training engine that exports adapters.",
        )
    parts = adapter_stream.marked(adapter, peft_config, base_sync_done=True)
    if "dummy" not in worker.config.rollout.load_format or worker in _based:
        return parts
    base, peft_config = export(layered_summon=summon, base_sync_done=False)
    return itertools.chain(adapter_stream.marked(base, peft_config, base_sync_done=False), parts)


PATCH = Patch(
    id=ID,
    targets=(f"{WORKER}.update_weights",),
    requires="verl>=0.9",
    wrapper=on_update,
    contract=Contract(
        params=("global_steps", "mode"),
        mentions=(
            "self.actor.engine.get_per_tensor_param",
            "self.checkpoint_engine.send_weights",
        ),
    ),
    evidence="optional",
    scope=frozenset({"trainer"}),
    why="For every checkpoint engine but naive verl drops the adapter's configuration and sends the base alone: rollouts in "
    "processes of their own draw from the first policy for ever, with nothing in the log (verl#7495).",
    how="Sends the base once, if the engine was opened on dummy weights, and the adapter each time, each behind a tensor that "
    "holds its configuration; the rollout's client hands both on as verl does with naive.",
    upstream="https://github.com/verl-project/verl/issues/7495",
    remove_when="verl sends peft_config and adapters through all checkpoint engines.",
)
