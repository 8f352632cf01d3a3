"""Register the loss as a loss mode with verl's own registry."""

from __future__ import annotations

from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss import batch_counts
from flashpatch.record import Contract, Patch

MODE = "grpo_exact"
ID = "grpo.verl.register_policy_loss"
ALGOS = "verl.trainer.ppo.core_algos"


def policy_loss(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Implement verl's policy loss interface, see ``verl.trainer.ppo.core_algos.register_policy_loss``.

    Args:
        old_log_prob, log_prob, advantages: [samples, tokens], float32.
        response_mask: [samples, tokens].
        loss_agg_mode: one of `flashpatch.patches.grpo.loss.grpo_exact.AGGREGATIONS`.
        config: verl's ``ActorConfig``: clip ratios, and ``global_batch_info`` with the batch's counts.
        rollout_is_weights: [samples, tokens], verl's own importance weights, if it computed some.

    Raises:
        PatchError: the counts in ``config`` are not those of the samples that are really there.
    """
    import torch

    from flashpatch.patches.grpo.loss.grpo_exact import Clip, Counts, grpo_loss

    engine.record_call(ID)
    info = config.global_batch_info
    counts = batch_counts.last()
    given = info.get("global_batch_size"), info.get("batch_num_tokens")
    if counts is None and engine.statuses()[batch_counts.ID].state.word == "superseded":
        counts = Counts(*given)
    if counts is None or given != (max(counts.samples, 1), max(counts.tokens, 1)):
        raise PatchError(
            f"was given the counts {given}, and the batch was counted as {counts}.",
            patch=ID,
            target=batch_counts.TARGET,
            advice=f"{batch_counts.ID} must be live in every trainer: see flashpatch-verify --live.",
        )
    pick = config.get
    found = grpo_loss(
        log_prob,
        advantages,
        response_mask,
        counts,
        world=info.get("dp_size", 1),
        aggregation=loss_agg_mode,
        constant=info.get("loss_scale_factor"),
        old_logprobs=old_log_prob,
        clip=Clip(
            config.clip_ratio if pick("clip_ratio_low") is None else config.clip_ratio_low,
            config.clip_ratio if pick("clip_ratio_high") is None else config.clip_ratio_high,
            pick("clip_ratio_c", 3.0),
        ),
        weights=rollout_is_weights,
    )
    sums = found.sums
    totals = torch.stack([sums[name] for name in ("clipped", "log_ratio", "clipped_dual")])
    means = (totals / sums["tokens"].clamp(min=1)).tolist()
    return found.loss, {
        "actor/pg_clipfrac": means[0],
        "actor/ppo_kl": means[1],
        "actor/pg_clipfrac_lower": means[2],
        "actor/samples": counts.samples,
    }


policy_loss.divides_by = "aggregation"  # type: ignore[attr-defined]  # read by streaming.divisor


def native(site: Any) -> str | None:
    """Name verl's own losses if the option loss is off: then the mode is not registered, and no step calls it."""
    return None if site.options.get("loss", True) else "the loss that verl's configuration names"


def apply(site: Any) -> None:
    """Register the mode."""
    site.module.register_policy_loss(MODE)(policy_loss)


def undo(site: Any) -> None:
    """Remove it from the registry."""
    if site.module.POLICY_LOSS_REGISTRY.get(MODE) is policy_loss:
        del site.module.POLICY_LOSS_REGISTRY[MODE]


PATCH = Patch(
    id=ID,
    targets=(f"{ALGOS}:register_policy_loss",),
    requires="verl>=0.9",
    apply=apply,
    undo=undo,
    native=native,
    contract=Contract(
        params=("name",),
        mentions=("POLICY_LOSS_REGISTRY",),
        exists=(
            f"{ALGOS}:POLICY_LOSS_REGISTRY",
            f"{ALGOS}:get_policy_loss_fn",
            "verl.workers.config.actor:ActorConfig.global_batch_info",
        ),
    ),
    evidence="step",
    scope=frozenset({"trainer"}),
    needs=(batch_counts.ID,),
    why="The gradient of verl's own losses depends on how a batch was divided: through the configured batch "
    "size, and under seq-mean-token-sum-norm through the width of a micro-batch.",
    how=f'Registers the policy loss "{MODE}" with verl, unless the option loss is off. Reference KL, entropy and '
    "importance weights stay verl's.",
    remove_when="verl's losses divide by the samples and tokens that the batch really holds.",
)
