"""Compute per-token log-probabilities from hidden states and the head, without all logits.

The source of the idea is async-grpo's ``PerTokenLogProbsFromCE``: the log-probability of a token is minus its
cross entropy, and a label of -100 gives 0. Here the logits of all tokens never exist at once: forward and
backward go through blocks of tokens and vocabulary, see `flashpatch.patches.grpo.loss.linear_ce`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss.linear_ce import LinearCrossEntropy, Shape

IGNORE = -100
"""The label of a token that is no output."""

TOKENS, VOCABULARY = 1024, 4096
"""Default block: 16 MiB of float32 logits."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Hold the results of one pass over the head; every field has the shape of the labels.

    Attributes:
        logprobs: float32 (float64 for float64 input), log-probability of the label; 0 where it is -100.
        entropy: same dtype, entropy of the distribution in nats, 0 where the label is -100; None unless asked."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy: bool = False,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
) -> TokenLogprobs:
    """Compute log-probabilities of labels under ``softmax(hidden @ head.T / temperature)``.

    Differentiable in ``hidden`` and ``head``, once; entropy too. Tokens labelled -100 cost nothing. All sums
    are float32, also for bf16 input; gradients are rounded to the input's dtype once, at the end.

    Args:
        hidden: [..., H], floating point; already shifted so that ``hidden[i]`` predicts ``labels[i]``.
        head: [V, H], same dtype and device.
        labels: [...], int64, in [0, V), or -100.
        temperature: positive; a number, or a tensor of the labels' shape.
        entropy: also return the entropy.
        tokens, vocabulary: largest block of logits in memory.

    Raises:
        PatchError: there are more or fewer labels than hidden states, a label is outside the vocabulary, or the temperature is not positive.
    """
    if labels.shape != hidden.shape[:-1]:
        shapes = f"{tuple(labels.shape)}, and hidden states {tuple(hidden.shape)}"
        raise _refusal(f"labels have the shape {shapes}.", "Give one label for each.")
    flat = labels.reshape(-1)
    keep = flat != IGNORE
    wanted = flat[keep]
    total = head.shape[0]
    if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= total):
        worst = int(wanted.min()) if int(wanted.min()) < 0 else int(wanted.max())
        raise _refusal(f"label {worst} is outside of a vocabulary of {total} tokens.", "Mask with -100.")
    scale = _scale(temperature, keep)
    rows = hidden.reshape(-1, hidden.shape[-1])
    # A selection of all rows would only copy them.
    rows = rows if bool(keep.all()) else rows[keep]
    shape = Shape(tokens, vocabulary, entropy)
    found = LinearCrossEntropy.apply(rows, head, wanted, scale, shape)

    def spread(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        if values.numel() == flat.numel():
            return values.reshape(labels.shape)
        return values.new_zeros(flat.shape).masked_scatter(keep, values).reshape(labels.shape)

    return TokenLogprobs(*map(spread, found))


def _scale(temperature: float | torch.Tensor, keep: torch.Tensor) -> float | torch.Tensor:
    """Return one over the temperature: a number, or one value per wanted token."""
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        chosen = temperature.reshape(-1)[keep]
        if not bool((chosen > 0).all()):
            raise _refusal("the temperature is not positive everywhere.", "Give positive values.")
        return chosen.reciprocal()
    if not 0 < float(temperature) < float("inf"):
        raise _refusal(f"the temperature is {float(temperature)}.", "Give a positive number.")
    return 1.0 / float(temperature)


def _refusal(problem: str, advice: str) -> PatchError:
    return PatchError(problem, patch="grpo.verl.fused_linear_for_ppo_forward", advice=advice)
