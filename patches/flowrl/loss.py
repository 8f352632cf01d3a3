"""Give verl the loss mode ``flowrl``, and the loss what verl does not pass: log Z and the reference's logprobs.

A learned log Z comes with the actor's outputs; with ``log_z = "group"`` it is in the advantages, by `compute_advantage`."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import fused_head, gathered
from flashpatch.patches._shared.context import holding
from flashpatch.patches._shared.flow_names import MODE
from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.options import LOG_Z

ALGOS = "verl.trainer.ppo.core_algos"
NEEDED = ("old_log_probs", "ref_log_prob", "token_level_rewards", "response_mask")

patches = Patches("flowrl", "verl>=0.9", scope="trainer", remove_when="verl has the trajectory-balance loss.")
gathered.before_exchange(patches)
fused_head.ask_the_model(patches)


@dataclass(eq=False)
class _Given:
    """Carry between `ppo_loss` and `trajectory_balance` what verl does not pass on.

    Attributes:
        log_z: ``(batch,)``; 0 if the advantages have it already.
        ref_log_prob: ``(batch, tokens)``.
        metrics: verl's `Metric` by name; verl would average those that a loss function returns over
            micro-batches of different sizes."""

    log_z: Any
    ref_log_prob: Any
    metrics: dict[str, Any] = field(default_factory=dict)


_given: ContextVar[_Given | None] = ContextVar("flashpatch_flowrl_given", default=None)


@patches.wrap(
    "verl.workers.utils.losses:ppo_loss",
    relies_on=("config.policy_loss.get", "get_policy_loss_fn", "config.global_batch_info", "pg_metrics"),
    why="Loss functions registered with verl get neither the model's outputs nor the reference's logprobs.",
)
def ppo_loss(original, config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Take log Z from the actor's outputs and give it, with the reference's logprobs, to the loss flowrl while verl's
    ppo_loss calls that; entropy bonus and metrics stay verl's.

    Raises PatchError if the mode is ``flowrl`` and log Z or the reference's logprobs are missing."""
    if config.policy_loss.get("loss_mode") != MODE:
        return original(config, model_output, data, dp_group)
    from verl.utils import tensordict_utils as tu

    log_z = model_output.pop(LOG_Z, None)  # per response: verl reports outputs per token
    in_advantages = options.current().log_z == "group"
    missing = [
        what
        for what, there in (
            ("log Z (the actor was built without a partition function)", in_advantages or log_z is not None),
            ("ref_log_prob (actor.use_kl_loss=True computes it)", "ref_log_prob" in data),
        )
        if not there
    ]
    if missing:
        raise PatchError(
            f"lacks {' and '.join(missing)}.",
            **patches.at(ppo_loss),
            advice="Start the job through a trainer that calls verl.utils.config.validate_config.",
        )
    reference = data.select("ref_log_prob").to_padded_tensor()["ref_log_prob"]
    if data["batch_num_tokens"] == 0:  # verl divides by it
        tu.assign_non_tensor(data, batch_num_tokens=1)
    given = _Given(reference.new_zeros(len(reference)) if in_advantages else log_z, reference)
    with holding(_given, given):
        loss, metrics = original(config, model_output, data, dp_group)
    return loss, {**metrics, **given.metrics}


@patches.register(
    f"{ALGOS}:register_policy_loss",
    relies_on=(
        "POLICY_LOSS_REGISTRY",
        f"{ALGOS}:POLICY_LOSS_REGISTRY",
        f"{ALGOS}:agg_loss",
        "verl.utils.metric.utils:Metric",
    ),
    params="name",
    why="verl has no trajectory-balance loss.",
    upstream="FlowRL, arXiv 2509.15207",
)
def register_policy_loss(site: Any) -> Callable[[], None]:
    """Register the loss mode flowrl with verl's own registry; verl's agg_loss scales it over micro-batches and ranks.

    Raises PatchError if another loss is registered under this name."""
    registry = site.module.POLICY_LOSS_REGISTRY
    taken = registry.get(MODE)
    if taken is not None and taken is not trajectory_balance:
        raise PatchError(
            f"finds the loss mode {MODE!r} registered by {taken.__module__} already.",
            **patches.at(register_policy_loss),
            advice="Remove that registration, or take flowrl out of FLASHPATCH.",
        )
    site.module.register_policy_loss(MODE)(trajectory_balance)

    def take_away() -> None:
        if registry.get(MODE) is trajectory_balance:
            del registry[MODE]

    return take_away


def clip_range(config: Any) -> dict[str, float]:
    """Return the weight's clip, ``low`` and ``high``: ``clip_ratio`` if one is not set, as in verl's own losses."""
    both = {"low": config.clip_ratio_low, "high": config.clip_ratio_high}
    return {name: config.clip_ratio if value is None else value for name, value in both.items()}


def trajectory_balance(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Compute verl's policy loss ``flowrl``: the mean over responses, scaled as verl's own sequence means are, so that
    the gradient does not depend on micro-batches and ranks.

    All tensors are ``(batch, tokens)``. ``loss_agg_mode`` concerns tokens and is not used. Raises PatchError if it was
    called by something else than verl's ``ppo_loss``."""
    from flashpatch.patches.flowrl.objective import balance

    given = _given.get()
    if given is None:
        raise PatchError(
            "was called without log Z and the reference's logprobs.",
            **patches.at(register_policy_loss),
            advice="Only verl.workers.utils.losses.ppo_loss can use the loss mode flowrl.",
        )
    engine.record_call(patches.of(register_policy_loss).id)
    chosen = options.current()
    parts = balance(
        given.log_z,
        log_prob,
        old_log_prob,
        given.ref_log_prob,
        advantages,
        response_mask,
        beta=chosen.beta,
        length=chosen.length,
        weight=chosen.weight,
        **clip_range(config),
        cap=chosen.weight_cap,
        correction=rollout_is_weights,
    )
    loss = _over_responses(parts.loss, response_mask, config)
    given.metrics.update(_metrics(parts, loss, log_prob, advantages, response_mask, given, config))
    return loss, {}


# What a streamed step divides by: grpo's trainer mode stream_async reads both.
trajectory_balance.divides_by = "samples"  # type: ignore[attr-defined]
trajectory_balance.metrics_divide_by = dict.fromkeys(  # type: ignore[attr-defined]
    ("actor/logpf", "actor/logp_ref", "actor/log_reward"), "tokens"
)


def _over_responses(values: Any, mask: Any, config: Any) -> Any:
    """Return this micro-batch's part of the mean over all responses of the global batch, of ``(batch,)``."""
    from verl.trainer.ppo.core_algos import agg_loss

    spread = values.unsqueeze(1).expand(mask.shape)
    return agg_loss(spread, mask, "seq-mean-token-mean", **config.global_batch_info)


def _metrics(
    parts: Any, loss: Any, log_prob: Any, advantages: Any, mask: Any, given: _Given, config: Any
) -> dict[str, Any]:
    """Return FlowRL's metrics, exact over micro-batches and ranks: sums of parts of the global mean."""
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.metric import AggregationType, Metric

    residual = parts.residual.detach()
    sums = {
        "actor/tb_loss": loss.detach(),
        **{
            f"actor/{name}": agg_loss(values.float(), mask, "token-mean", **config.global_batch_info)
            for name, values in (
                ("logpf", log_prob.detach()),
                ("logp_ref", given.ref_log_prob),
                ("log_reward", advantages),
            )
        },
        **{
            f"actor/{name}": _over_responses(values.float(), mask, config)
            for name, values in (
                *((("log_z", given.log_z.detach()),) if options.current().log_z == "learned" else ()),
                ("tb_residual_mean", residual),
                ("tb_residual_square", residual.square()),
                ("tb_weight", parts.weight),
                ("tb_weight_clipfrac", parts.clipped),
            )
        },
    }
    uncounted, none = ~mask.bool().any(1), float("inf")  # the least of nothing: it changes no other's
    least = residual.masked_fill(uncounted, none).min()
    most = residual.masked_fill(uncounted, -none).max()
    return {
        **{name: Metric(AggregationType.SUM, value) for name, value in sums.items()},
        "actor/tb_residual_min": Metric(AggregationType.MIN, least),
        "actor/tb_residual_max": Metric(AggregationType.MAX, most),
    }


@patches.wrap(
    "verl.trainer.ppo.ray_trainer:compute_advantage",
    relies_on=(
        "data.batch",
        "data.non_tensor_batch",
        "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
    ),
    params=("data", "adv_estimator"),
    evidence="optional",  # only one of a job's drivers has it
    scope="driver",
    why="A log Z estimated from the responses to one prompt needs all of them: micro-batches and ranks split groups.",
    remove_when="verl has a trajectory-balance loss with a group estimate of log Z.",
    upstream="VarGrad, arXiv 2010.10436",
)
def compute_advantage(original, data: Any, *args: Any, **kwargs: Any) -> Any:
    """With reward = "raw" replace the advantages, (batch, tokens), by the response's reward; with log_z = "group" subtract
    the group's log Z, in units of the reward, so that the residual of FlowRL's loss needs none.

    Raises PatchError if the batch lacks what the group's log Z is computed from."""
    done = original(data, *args, **kwargs)
    chosen = options.current()
    if chosen.reward == "raw":
        done.batch["advantages"] = _spread(done.batch["token_level_rewards"].sum(-1), done.batch)
    if chosen.log_z == "group":
        done.batch["advantages"] = less_log_z(done.batch, done.non_tensor_batch.get("uid"), chosen)
    return done


def _spread(values: Any, batch: Any) -> Any:
    """Repeat a number per response, ``(batch,)``, over its tokens; 0 at those that do not count."""
    return values.unsqueeze(-1) * batch["response_mask"]


def less_log_z(batch: Any, uids: Any, chosen: SimpleNamespace) -> Any:
    """Return the advantages less ``log Z / beta`` of each response's group, ``(batch, tokens)``, from verl's tensors by
    name and the uid of each response's prompt. The log-probabilities are the rollout's, or without them the trainer's. Raises PatchError if something is missing."""
    import numpy
    import torch

    from flashpatch.patches.flowrl.objective import group_log_z

    missing = [name for name in NEEDED if name not in batch.keys()]
    missing += ["uid"] if uids is None else []
    if missing:
        raise PatchError(
            f"cannot compute log Z of a group: the batch lacks {', '.join(missing)}.",
            **patches.at(compute_advantage),
            advice='Set log_z = "learned" in [flowrl], or use a trainer that computes the reference before advantages.',
        )
    advantages = batch["advantages"]
    numbers = numpy.unique(numpy.asarray(uids, dtype=str), return_inverse=True)[1]
    sampled = "rollout_log_probs" if "rollout_log_probs" in batch.keys() else "old_log_probs"
    log_z = group_log_z(
        batch[sampled],
        batch["ref_log_prob"],
        advantages,
        batch["response_mask"].bool(),
        torch.as_tensor(numbers, device=advantages.device),
        beta=chosen.beta,
        length=chosen.length,
    )
    return advantages - _spread(log_z.to(advantages.dtype) / chosen.beta, batch)
