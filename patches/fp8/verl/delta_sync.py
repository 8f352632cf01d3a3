"""Send what changed since the last sync through verl's checkpoint engines: the trainer's and the rollouts' ends.

The driver says before each sync which version it makes and which one all rollouts hold (`delta_versions`). A checkpoint
engine carries names and tensors, so patches travel as tensors; what arrives is brought together before the rollout's client
sees any of it, so that the engine's update is that of a sync of everything."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8.delta.receiver import Damaged, Receiver
from flashpatch.patches.fp8.delta.sender import Sender
from flashpatch.patches.fp8.verl import adapters

ROLLOUT = "verl.checkpoint_engine.base:CheckpointEngineWorker"
FAMILY = "fp8"
UNSUPPORTED_BACKENDS = ("naive", "delta_sharded")
"""Backends that take no stream of weights: one within a process, and verl's own differences."""

WARN_SHARE = 0.9  # of the bytes of everything: nothing is gained

logger = logging.getLogger("flashpatch.fp8")

patches = Patches(
    "fp8",
    "verl>=0.9",
    evidence="update",
    when="delta_sync=true anywhere=fp8.verl.checkpoint_manager_update_weights_delta",
    scope="trainer",
    remove_when="verl sends differences through all checkpoint engines, to quantized engines too.",
)


class Plan(NamedTuple):
    """Describe the next sync to the trainer.

    Attributes:
        version: that it makes.
        base: that all rollouts hold; None if they hold several or none.
        wide: names of weights that some rollout holds in float32: all others are sent in bf16. None: not known, nothing is cast.
    """

    version: str
    base: str | None
    wide: Collection[str] | None


class DeltaState:
    """Hold both ends of this process; at most one is in use.

    Attributes:
        plan: in the trainer; None before the driver has told.
        exporting: the plan, while the trainer's engine prepares its weights for it."""

    def __init__(self) -> None:
        self.sender, self.receiver = Sender(), Receiver()
        self.plan: Plan | None = None
        self.exporting: Plan | None = None


STATE = DeltaState()


def is_on() -> bool:
    """Whether this process takes part."""
    return engine.enabled(FAMILY) and bool(engine.options(FAMILY)["delta_sync"])


def answer(what: str, *given: Any) -> Any:
    """Answer the driver: ``held`` version, with True, or why a sync was ``refused``; or ``expect`` a `Plan`. None if this process
    takes no part."""
    if not is_on():
        return None
    if what == "held":
        return True, STATE.receiver.version
    if what == "refused":
        return STATE.receiver.refused
    STATE.plan = Plan(*given)
    return True


@patches.wrap(
    f"{adapters.WORKER}.update_weights",
    relies_on=("self.actor.engine.get_per_tensor_param", "self.checkpoint_engine.send_weights"),
    why="Between two steps of RL one to three per cent of bf16 weights change, and verl sends all; its own differences "
    "(delta_sharded) go to bf16 engines on CUDA alone.",
)
async def actor_update_weights_delta(
    original, self, global_steps: int | None = None, mode: str = "auto", *args: Any, **kwargs: Any
) -> Any:
    """With delta_sync, keep what was sent last, and send patches of what changed, with versions and fingerprints; return what that
    took beside verl's numbers."""
    backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
    plan, STATE.plan = STATE.plan, None
    if plan is None or backend in UNSUPPORTED_BACKENDS or adapters.asked(self.config.model):
        return await original(self, global_steps, mode, *args, **kwargs)
    ledger.role("trainer")
    transfer = self.checkpoint_engine
    with having(STATE, "exporting", plan):
        weights, _ = self.actor.engine.get_per_tensor_param()
    rank = getattr(transfer, "rank", None)
    if rank is not None and rank < 0:  # it gathers, and sends nothing
        return await transfer.send_weights(weights, global_steps=global_steps) or {}
    metrics = await transfer.send_weights(
        STATE.sender.stream(weights, plan.version, plan.base), global_steps=global_steps
    )
    STATE.sender.sent()
    return {**(metrics or {}), **_recorded(global_steps, plan)}


def _recorded(step: int | None, plan: Plan) -> dict[str, float]:
    """Write the last sync's numbers into the ledger, and return them under verl's names."""
    assert STATE.sender.last is not None
    facts = STATE.sender.last.facts()
    ledger.note(delta=facts)
    ledger.event("delta", step=step, **facts)
    changed = facts["changed"] / facts["values"] if facts["base"] and facts["values"] else 1.0
    if facts["base"] and facts["share"] > WARN_SHARE:
        logger.warning(
            "[flashpatch: %s] step %s: %.0f %% of the values changed, so delta_sync saves nothing (%s)",
            patches.of(actor_update_weights_delta).id,
            step,
            100 * changed,
            "rollouts did not say which weights may come in bf16"
            if plan.wide is None
            else f"rollouts hold {len(plan.wide)} weights in float32",
        )
    return {
        "sync/wire_bytes": float(facts["bytes"]),
        "sync/wire_share": facts["share"],
        "sync/changed_share": changed,
        "timing_s/sync/compare": facts["seconds"],
    }


@patches.wrap(
    "verl.workers.engine.fsdp.utils:unfuse_moe_params",
    relies_on="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",
    evidence="optional",
    why="With model_dtype=fp32, its default, verl's FSDP sends the optimizer's float32 weights, nearly all of which change "
    "with each step; rounded to bf16, as engines hold them, few do.",
)
def unfuse_moe_params(original, weights: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """With delta_sync, cast to bf16 what no rollout holds in float32, before an audit takes fingerprints."""
    unfused, plan = original(weights, *args, **kwargs), STATE.exporting
    return unfused if plan is None or plan.wide is None else _cast(unfused, frozenset(plan.wide))


def _cast(weights: Any, wide: frozenset[str]) -> Iterator[tuple[str, Any]]:
    import torch

    for name, tensor in weights:
        narrow = tensor.dtype == torch.float32 and name not in wide
        yield name, tensor.to(torch.bfloat16) if narrow else tensor


@patches.wrap(
    f"{ROLLOUT}.update_weights",
    relies_on=("self.checkpoint_engine.receive_weights", "self.server_adapter.update_weights"),
    why="A rollout's client takes whole weights.",
)
async def rollout_update_weights_delta(
    original, self, global_steps: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """With delta_sync, keep the weights, bring them up to date, compare fingerprints, and hand all of them on; load nothing if they
    were refused.

    Raises PatchError if everything came and is not what was sent."""
    if self.rollout_config.checkpoint_engine.backend in UNSUPPORTED_BACKENDS or not is_on():
        return await original(self, global_steps, *args, **kwargs)
    receiver, transfer = STATE.receiver, self.checkpoint_engine
    try:
        weights = await receiver.take(transfer.receive_weights(global_steps=global_steps))
        if weights is None:
            return None  # the driver reads why, and has everything sent
        await self.server_adapter.update_weights(
            weights, global_steps=global_steps, wire_format=getattr(transfer, "wire_format", "named_tensors")
        )
    except Damaged as damage:
        raise PatchError(
            f"the weights of step {global_steps} were damaged on their way: {damage}",
            patch=patches.of(rollout_update_weights_delta).id,
            target=ROLLOUT,
            advice="The update was not committed. Send the weights again, or look for the damage in the transfer.",
        ) from damage
    receiver.commit()
    ledger.note(delta=receiver.facts)
    return None
