"""Register the loss mode ``flowrl`` with verl, and give it the inputs that verl does not pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches._shared.flow_names import MODE
from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.forward import LOG_Z
from flashpatch.record import Contract, Patch

ALGOS = "verl.trainer.ppo.core_algos"
LOSSES = "verl.workers.utils.losses"
MODE_ID = "flowrl.verl.register_policy_loss"
LOSS_ID = "flowrl.verl.ppo_loss"


@dataclass(eq=False)
class _Given:
    """Hold the registered loss's inputs and outputs that verl does not pass.

    Attributes:
        log_z: ``(batch,)``; 0 if the advantages have it already.
        ref_log_prob: ``(batch, tokens)``.
        metrics: verl's `Metric` by name; verl would average those that a loss function returns over
            micro-batches of different sizes.
    """

    log_z: Any
    ref_log_prob: Any
    metrics: dict[str, Any] = field(default_factory=dict)


_given: ContextVar[_Given | None] = ContextVar("flashpatch_flowrl_given", default=None)


def on_loss(original, config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Give the registered loss the model outputs and reference logprobs while ``ppo_loss`` calls it.

    Raises:
        PatchError: the mode is ``flowrl`` and log Z or the reference's logprobs are missing.
    """
    if config.policy_loss.get("loss_mode") != MODE:
        return original(config, model_output, data, dp_group)
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
            patch=LOSS_ID,
            target=LOSS.targets[0],
            advice="Start the job through a trainer that calls verl.utils.config.validate_config.",
        )
    reference = data.select("ref_log_prob").to_padded_tensor()["ref_log_prob"]
    given = _Given(reference.new_zeros(len(reference)) if in_advantages else log_z, reference)
    with _giving(given):
        loss, metrics = original(config, model_output, data, dp_group)
    return loss, {**metrics, **given.metrics}


@contextmanager
def _giving(given: _Given) -> Iterator[None]:
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def trajectory_balance(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """verl's policy loss ``flowrl``: the mean over responses, scaled as verl's own sequence means are, so
    that the gradient does not depend on micro-batches and ranks.

    All tensors are ``(batch, tokens)``. ``loss_agg_mode`` concerns tokens and is not used.

    Raises:
        PatchError: it was called by something else than verl's ``ppo_loss``.
    """
    from flashpatch.patches.flowrl.objective import balance

    given = _given.get()
    if given is None:
        raise PatchError(
            "was called without log Z and the reference's logprobs.",
            patch=MODE_ID,
            target=REGISTRATION.targets[0],
            advice="Only verl.workers.utils.losses.ppo_loss can use the loss mode flowrl.",
        )
    engine.record_call(MODE_ID)
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
        low=config.clip_ratio_low,
        high=config.clip_ratio_high,
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
            f"actor/{name}": agg_loss(values, mask, "token-mean", **config.global_batch_info)
            for name, values in (
                ("logpf", log_prob.detach()),
                ("logp_ref", given.ref_log_prob),
                ("log_reward", advantages),
            )
        },
        **{
            f"actor/{name}": _over_responses(values, mask, config)
            for name, values in (
                *((("log_z", given.log_z.detach()),) if options.current().log_z == "learned" else ()),
                ("tb_residual_mean", residual),
                ("tb_residual_square", residual.square()),
                ("tb_weight", parts.weight),
                ("tb_weight_clipfrac", parts.clipped),
            )
        },
    }
    counted = mask.bool().any(1)
    least = residual.masked_fill(~counted, float("inf")).min()
    most = residual.masked_fill(~counted, float("-inf")).max()
    return {
        **{name: Metric(AggregationType.SUM, value) for name, value in sums.items()},
        "actor/tb_residual_min": Metric(AggregationType.MIN, least),
        "actor/tb_residual_max": Metric(AggregationType.MAX, most),
    }


def apply(site: Any) -> None:
    """Register the loss mode.

    Raises:
        PatchError: another loss is registered under this name.
    """
    taken = site.module.POLICY_LOSS_REGISTRY.get(MODE)
    if taken is not None and taken is not trajectory_balance:
        raise PatchError(
            f"finds the loss mode {MODE!r} registered by {taken.__module__} already.",
            patch=MODE_ID,
            target=site.target,
            advice="Remove that registration, or take flowrl out of FLASHPATCH.",
        )
    site.module.register_policy_loss(MODE)(trajectory_balance)


def undo(site: Any) -> None:
    """Remove it from the registry."""
    if site.module.POLICY_LOSS_REGISTRY.get(MODE) is trajectory_balance:
        del site.module.POLICY_LOSS_REGISTRY[MODE]


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    evidence="step",
    scope=frozenset({"trainer"}),
    remove_when="verl has the trajectory-balance loss.",
)

REGISTRATION = _patch(
    id=MODE_ID,
    targets=(f"{ALGOS}:register_policy_loss",),
    apply=apply,
    undo=undo,
    contract=Contract(
        params=("name",),
        mentions=("POLICY_LOSS_REGISTRY",),
        exists=(
            f"{ALGOS}:POLICY_LOSS_REGISTRY",
            f"{ALGOS}:agg_loss",
            "verl.utils.metric.utils:Metric",
        ),
    ),
    why="verl has no trajectory-balance loss.",
    how="Registers the loss mode flowrl with verl's own registry; verl's agg_loss scales it over "
    "micro-batches and ranks.",
    upstream="FlowRL, arXiv 2509.15207",
)

LOSS = _patch(
    id=LOSS_ID,
    targets=(f"{LOSSES}:ppo_loss",),
    wrapper=on_loss,
    contract=Contract(
        params=("config", "model_output", "data", "dp_group"),
        mentions=("config.policy_loss.get", "get_policy_loss_fn", "config.global_batch_info", "pg_metrics"),
    ),
    why="Loss functions registered with verl get neither the model's outputs nor the reference's logprobs.",
    how="For the mode flowrl, gives the registered function both while verl's ppo_loss calls it; "
    "entropy bonus and metrics stay verl's.",
)
