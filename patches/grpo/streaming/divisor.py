"""Say what a policy loss is divided by, so that a streamed step can divide by it after the last round.

A round's loss comes divided by the round's own samples or tokens. The step multiplies that back, and divides the sum of all
rounds by the whole batch's number. Some losses aggregate as ``loss_agg_mode`` says, others by samples always, and some
by a mean over whatever micro-batch they see: these have no gradient that a split leaves as it is. A loss cannot be asked,
so each declares its divisor, and one that does not is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import ID

AS_AGGREGATED = "aggregation"
UNITS = {
    "seq-mean-token-mean": "samples",
    "seq-mean-token-sum": "samples",
    "seq-mean-token-sum-norm": "samples",
    "token-mean": "tokens",
    "token-sum": "",
}
"""What verl's ``agg_loss`` divides by, by aggregation; "": nothing."""
DECLARED = "divides_by"
"""Attribute of a loss function: "samples", "tokens", "" for nothing, or `AS_AGGREGATED`."""
METRICS = "metrics_divide_by"
"""Attribute of a loss function: the same for those of its metrics that are sums and divide by something else."""
ALGOS = "verl.trainer.ppo.core_algos"
_OF_VERL = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "dro", "cispo"), AS_AGGREGATED),
    "sapo": "samples",
}
_NOT_OF_VERL = {
    "bypass_mode": "its old log-probabilities are the rollout's, and it rejects samples after they were counted",
    "clip_cov": "it draws tokens from each micro-batch, by means over that",
    "kl_cov": "it chooses tokens of each micro-batch, by means over that",
    "geo_mean": "it takes a mean over each micro-batch, so that even verl's own gradient depends on the split",
}
LOSS_MODE = "policy_loss.loss_mode"


@dataclass(frozen=True)
class Divisor:
    """Hold what the parts of a loss are divided by: "samples", "tokens", or "" for nothing.

    Attributes:
        loss: the policy loss.
        terms: the entropy and KL terms, which verl aggregates as ``loss_agg_mode`` says.
        metrics: by name, metrics that divide by something else than the policy loss."""

    loss: str
    terms: str
    metrics: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, aggregation: str, function: Any = None, declared: str = AS_AGGREGATED) -> Divisor:
        """Return that of a loss function, by its declaration; by ``declared`` if it has none."""
        terms = UNITS[aggregation]
        declared = getattr(function, DECLARED, declared)
        own = {"actor/entropy_loss": terms, "kl_loss": terms, **getattr(function, METRICS, {})}
        return cls(terms if declared == AS_AGGREGATED else declared, terms, own)

    def of_metric(self, name: str) -> str:
        """Return what a metric that is a sum was divided by."""
        return self.metrics.get(name, self.loss)


def problem(get: Callable[..., Any], registry: Mapping[str, Any]) -> str | None:
    """Say why an actor's loss, by its settings and verl's ``POLICY_LOSS_REGISTRY``, cannot be streamed, with a way out;
    None if it can, or is not registered in this process."""
    mode, aggregation = get(LOSS_MODE) or "vanilla", get("loss_agg_mode", "token-mean")
    function = registry.get(mode)
    if function is None:
        return None
    if aggregation not in UNITS:
        return f"loss_agg_mode={aggregation} (use one of {', '.join(UNITS)})"
    if (why := _undeclared(mode, function)) is not None:
        return f"{LOSS_MODE}={mode} ({why})"
    if aggregation == "seq-mean-token-sum-norm" and not get("loss_scale_factor"):
        return f"loss_agg_mode={aggregation} without loss_scale_factor (verl divides by a micro-batch's width then)"
    found = _divisor(mode, function, aggregation)
    terms = [
        f"{name}={get(name)}"
        for name in ("entropy_coeff", "kl_loss_coef")
        if get(name) and (name != "kl_loss_coef" or get("use_kl_loss"))
    ]
    if terms and found.loss != found.terms:
        return (
            f"{LOSS_MODE}={mode} with loss_agg_mode={aggregation} and {', '.join(terms)} (the loss divides by "
            f"{found.loss or 'nothing'}, these terms by {found.terms or 'nothing'}, and one gradient cannot be divided by "
            f"both: use an aggregation that divides by {found.loss or 'nothing'}, or set the terms to 0)"
        )
    return None


def of_actor(actor: Any, registry: Mapping[str, Any]) -> Divisor:
    """Return the divisor of the loss of verl's ``actor_rollout_ref.actor``, a dataclass or of OmegaConf, by verl's
    ``POLICY_LOSS_REGISTRY`` in a process that trains. Raises PatchError if the loss cannot be streamed."""

    def get(path: str, default: Any = None) -> Any:
        found = actor
        for name in path.split("."):
            found = found.get(name, None)
        return default if found is None else found

    mode = get(LOSS_MODE) or "vanilla"
    why = problem(get, registry)
    if why is None and mode not in registry:
        why = f"{LOSS_MODE}={mode} (no loss is registered under this name in the trainer)"
    if why is not None:
        raise PatchError(
            f"cannot stream rounds with actor.{why}.",
            patch=ID,
            target=f"{ALGOS}:POLICY_LOSS_REGISTRY",
            advice="Change that, or choose another trainer.v1.trainer_mode.",
        )
    return _divisor(mode, registry[mode], get("loss_agg_mode", "token-mean"))


def _divisor(mode: str, function: Any, aggregation: str) -> Divisor:
    return Divisor.of(aggregation, function, _OF_VERL.get(mode, AS_AGGREGATED))


def _undeclared(mode: str, function: Any) -> str | None:
    """Say why nothing is known of a loss's divisor; None if it is known."""
    declared = getattr(function, DECLARED, None)
    if declared is not None:
        known = ("samples", "tokens", "", AS_AGGREGATED)
        return None if declared in known else f"its {DECLARED} is {declared!r}; use one of {known}"
    if getattr(function, "__module__", None) == ALGOS:
        if mode in _OF_VERL:
            return None
        if mode in _NOT_OF_VERL:
            return _NOT_OF_VERL[mode]
    return f'it does not say what it divides by; give the function an attribute {DECLARED}: "samples", "tokens", or "{AS_AGGREGATED}" as loss_agg_mode says'
