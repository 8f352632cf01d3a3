"""Change what verl's losses divide by, register the exact loss as a loss mode, and compute log-probabilities exactly on
request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import fused_head, gathered

MODE = "grpo_exact"
ALGOS = "verl.trainer.ppo.core_algos"

_last: Any = None
"""The `Counts` last written into a batch of this process; None before the first."""

patches = Patches("grpo", "verl>=0.9", scope="trainer", evidence="step")
gathered.before_exchange(patches)
fused_head.ask_the_model(patches)


def last() -> Any:
    """Return the counts that this process last wrote into a training batch, by which the loss divides."""
    return _last


def native_counts(site: Any) -> str | None:
    """Name verl's own count if it is right for a batch of two samples of which one is masked out."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    batch = TensorDict({"response_mask": torch.tensor([[1, 1], [0, 0]])}, batch_size=2)
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, global_batch_size=2)
    (whole,), _ = site.original(batch)
    return "verl counts samples itself" if whole["global_batch_size"] == 1 else None


@patches.wrap(
    "verl.workers.engine.utils:prepare_micro_batches",
    relies_on=(
        "verl.utils.tensordict_utils:assign_non_tensor",
        "verl.utils.tensordict_utils:get_non_tensor_data",
        "verl.workers.utils.losses:ppo_loss",
    ),
    native=native_counts,
    why="verl divides the sequence-mean losses by the configured batch size. Padding samples, failed groups "
    "and samples that rejection took out are not in the sum but in the divisor, so the gradient shrinks "
    "with them; the number of tokens is counted from the mask before rejection.",
    remove_when="verl counts the samples of a mini-batch as it counts its tokens, and both after rejection.",
)
def prepare_micro_batches(original, data: Any, dp_group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Count samples and tokens of every mini-batch over all data-parallel ranks, from the mask that the loss uses, and
    write them where verl's losses read them. Actor and critic are both served.

    Here it is not divided into micro-batches yet. A training batch of PPO carries ``global_batch_size``, the configured
    number of samples, and ``batch_num_tokens``; batches without these fields (inference, supervised training) pass as
    they are."""
    global _last
    if "global_batch_size" in data.keys() and "response_mask" in data.keys():
        from verl.utils import tensordict_utils as tu

        from flashpatch.patches.grpo.loss.grpo_exact import count

        if tu.get_non_tensor_data(data, key="global_batch_size", default=None) is not None:
            _last = count(data["response_mask"], dp_group)
            tu.assign_non_tensor(data, global_batch_size=max(_last.samples, 1))
            tu.assign_non_tensor(data, batch_num_tokens=max(_last.tokens, 1))
    return original(data, dp_group, *args, **kwargs)


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
        PatchError: the counts in ``config`` are not those of the samples that are really there."""
    import torch

    from flashpatch.patches.grpo.loss.grpo_exact import Clip, Counts, grpo_loss

    engine.record_call(patches.of(register_policy_loss).id)
    info = config.global_batch_info
    counts, counting = last(), patches.at(prepare_micro_batches)
    given = info.get("global_batch_size"), info.get("batch_num_tokens")
    if counts is None and engine.statuses()[counting["patch"]].state.word == "superseded":
        counts = Counts(*given)
    if counts is None or given != (max(counts.samples, 1), max(counts.tokens, 1)):
        raise PatchError(
            f"was given the counts {given}, and the batch was counted as {counts}.",
            patch=patches.of(register_policy_loss).id,
            target=counting["target"],
            advice=f"{counting['patch']} must be live in every trainer: see flashpatch-verify --live.",
        )
    pick = config.get
    loss, sums = grpo_loss(
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
    totals = torch.stack([sums[name] for name in ("clipped", "log_ratio", "clipped_dual")])
    means = (totals / sums["tokens"].clamp(min=1)).tolist()
    return loss, {
        "actor/pg_clipfrac": means[0],
        "actor/ppo_kl": means[1],
        "actor/pg_clipfrac_lower": means[2],
        "actor/samples": counts.samples,
    }


policy_loss.divides_by = "aggregation"  # type: ignore[attr-defined]  # read by streaming.divisor


def native_losses(site: Any) -> str | None:
    """Name verl's own losses if the option loss is off: then the mode is not registered, and no step calls it."""
    return None if site.options.get("loss", True) else "the loss that verl's configuration names"


@patches.register(
    f"{ALGOS}:register_policy_loss",
    params="name",
    relies_on=(
        "POLICY_LOSS_REGISTRY",
        f"{ALGOS}:POLICY_LOSS_REGISTRY",
        f"{ALGOS}:get_policy_loss_fn",
        "verl.workers.config.actor:ActorConfig.global_batch_info",
    ),
    native=native_losses,
    why="The gradient of verl's own losses depends on how a batch was divided: through the configured batch "
    "size, and under seq-mean-token-sum-norm through the width of a micro-batch.",
    remove_when="verl's losses divide by the samples and tokens that the batch really holds.",
)
def register_policy_loss(site: Any) -> Callable[[], None]:
    """Register the policy loss "grpo_exact" with verl, unless the option loss is off. Reference KL, entropy and importance
    weights stay verl's."""
    site.module.register_policy_loss(MODE)(policy_loss)

    def take_away() -> None:
        if site.module.POLICY_LOSS_REGISTRY.get(MODE) is policy_loss:
            del site.module.POLICY_LOSS_REGISTRY[MODE]

    return take_away


def native_logprobs(site: Any) -> str | None:
    """Name verl's own if the option logprobs is off. It is not tried out: with flash-attn its kernel needs a GPU."""
    return None if site.options.get("logprobs") else f"verl's {site.owner.__name__}"


@patches.wrap(
    "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward",
    native=native_logprobs,
    evidence="optional",
    why="verl's fused log-probabilities (model.use_fused_kernels) are chunked and right in float32. In bf16 "
    "they round logits, entropy and the sum of the head's gradient; without an accelerator bf16 products are slow.",
    remove_when="verl's torch backend sums in float32.",
)
def fused_linear_for_ppo_forward(
    original, self, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0
) -> tuple[Any, Any]:
    """Keep verl's fused log-probabilities by default. With the option logprobs, compute them in blocks with float32 sums."""
    from flashpatch.patches.grpo.loss.logprobs import token_logprobs

    weights = vocab_weights
    if hasattr(weights, "full_tensor"):  # FSDP2 reduces no gradient of a unit whose forward is not called
        from torch.distributed.tensor import Partial

        ranks = weights.device_mesh.size()
        weights = weights.full_tensor(grad_placements=[Partial()] * weights.device_mesh.ndim)
        weights = weights.to(hidden_states.device)  # with CPU offload it is on the host
        if weights.requires_grad:
            weights.register_hook(lambda gradient: gradient / ranks)
    found = token_logprobs(
        hidden_states.to(weights.dtype), weights, input_ids.long(), temperature=temperature, entropy=True
    )
    return found.logprobs, found.entropy
