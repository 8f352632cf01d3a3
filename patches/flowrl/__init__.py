"""Train FlowRL on stock verl: match the reward's distribution instead of maximising the reward.

How log Z, the partition function's output for a prompt, comes into the loss:

1. `actor.build_module` adds the partition function to the actor's model, as ``proj_z``, before FSDP wraps it.
2. In the actor's forward pass `partition_function.Capture` gives it the mean of each prompt's last hidden states.
3. `actor.prepare_model_outputs` names the result ``log_z`` among the actor's outputs, which verl gives to its ``ppo_loss``.
4. `loss.ppo_loss` hands it to `loss.trajectory_balance`, the loss mode registered with verl; `objective.balance` is the formula.

With ``log_z = "group"`` there is no partition function: `loss.compute_advantage` subtracts log Z from the advantages.
Around that, `verl_config` sets and refuses settings, and `checkpoint` keeps ``proj_z`` in verl's checkpoints and out of weights
that leave the trainer."""

from __future__ import annotations

import sys

from flashpatch.decorate import collected
from flashpatch.patches.flowrl import actor, checkpoint, loss, options, verl_config
from flashpatch.record import Family


def _too_late() -> str | None:
    """Return a sentence if an actor was built before the family was enabled."""
    module = sys.modules.get(actor.IMPL)
    if module is None:
        return None
    import gc

    built = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), module.FSDPEngine) and getattr(o, "module", None) is not None
    ]
    trained = [engine for engine in built if not engine.engine_config.forward_only]
    if not any(actor.capture(engine) is None for engine in trained):
        return None
    return "verl has built an actor already, without partition function; enable flowrl before that."


FAMILY = Family(
    name="flowrl",
    summary="FlowRL: trajectory balance with a learned partition function, as a loss mode of stock verl",
    patches=collected(verl_config, actor, loss, checkpoint),
    options=options.OPTIONS,
    too_late=_too_late,
    refuses=(
        "verl.utils.config:validate_config",
        "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
        "verl.workers.actor.dp_actor:DataParallelPPOActor.__init__",  # of verl before 0.8
    ),
)
