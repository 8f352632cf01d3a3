"""Warn of truncated sampling if importance ratios are used, and measure the probability that it keeps.

Under top-p, top-k or min-p a token is drawn from the kept set K of its position, from the rollout's policy
normalized over K. That is what processed logprobs are of, while the trainer's are over the whole vocabulary. So the
ratio ``trainer / rollout`` of equal policies is not 1 but the kept mass, the sum of the policy over K. For policies
that differ, quantized rollouts say, its mean over tokens drawn from the rollout is still the trainer's mass of K:
the sum over K of ``rollout * trainer / rollout``. Nothing but truncation moves that mean away from 1."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashpatch import ledger

if TYPE_CHECKING:
    from flashpatch.patches._shared.verl_config import Get

logger = logging.getLogger("flashpatch.fp8")

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
NOTE = "truncated_sampling"
"""Key of the driver's note in the ledger."""


def settings(get: Get) -> list[str]:
    """Return the settings that truncate the sampling of training rollouts, as ``path=value``.

    Those of ``val_kwargs`` are for validation, whose tokens are not trained on."""
    top_p, top_k, min_p = (get(f"{ROLLOUT}.{name}") for name in ("top_p", "top_k", "min_p"))
    found = {"top_p": top_p is not None and top_p < 1, "top_k": (top_k or 0) > 0, "min_p": (min_p or 0) > 0}
    return [f"{ROLLOUT}.{name}={get(f'{ROLLOUT}.{name}')}" for name, truncates in found.items() if truncates]


def ratios(get: Get) -> list[str]:
    """Return the settings that make verl use ratios of the trainer's to the rollout's policy, as ``path=value``."""
    values = {
        f"{CORRECTION}.{name}": get(f"{CORRECTION}.{name}")
        for name in ("rollout_is", "rollout_rs", "bypass_mode")
    }
    return [f"{path}={value}" for path, value in values.items() if value]


def is_processed(get: Get) -> bool:
    """Whether the rollout's logprobs are normalized over the kept set: vLLM's processed ones. SGLang's are those
    after temperature alone."""
    return (
        get(f"{ROLLOUT}.name", "vllm") == "vllm" and get(f"{ROLLOUT}.logprobs_mode") == "processed_logprobs"
    )


def is_measurable(get: Get) -> bool:
    """Whether the kept mass of `flashpatch.patches.fp8.mismatch.monitor` says something: sampling is truncated, and logprobs
    are processed."""
    return bool(settings(get)) and is_processed(get)


def report(get: Get) -> None:
    """Note in the ledger what truncates the sampling, and warn if importance ratios are used as well."""
    truncated, used = settings(get), ratios(get)
    if truncated or NOTE in ledger.notes():
        ledger.note(**{NOTE: {"settings": truncated, "ratios": used, "measurable": is_measurable(get)}})
    if not truncated or not used:
        return
    if is_processed(get):
        effect = (
            "the rollout's logprobs are normalized over the tokens that truncation keeps, the trainer's over all, "
            "so every ratio is too small by the factor of the kept probability mass"
        )
        bypassed = bool(get(f"{CORRECTION}.bypass_mode"))
        shown = "" if bypassed else "; the metric mismatch/kept_mass measures it"
    else:
        effect = (
            "tokens are drawn from those that truncation keeps, but the rollout's logprobs are over all, so no "
            "ratio knows of the truncation"
        )
        shown = ", and it cannot be measured"
    logger.warning(
        "truncated sampling (%s) meets importance ratios (%s): %s%s. Train with top_p=1, top_k=-1 and without "
        "min_p, or without ratios; validation may truncate.",
        ", ".join(truncated),
        ", ".join(used),
        effect,
        shown,
    )
