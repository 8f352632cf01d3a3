"""Compute per-token log-probabilities from hidden states and the head, without all logits.

The source of the idea is async-grpo's ``PerTokenLogProbsFromCE``: the log-probability of a token is minus its
cross entropy, and a label of -100 gives 0. Here the logits of all tokens never exist at once: forward and
backward go through blocks of tokens and vocabulary, see `flashpatch.patches.grpo.loss.linear_ce`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashpatch.patches.grpo.errors import refuse
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
        entropy: same dtype, entropy of the distribution in nats, 0 where the label is -100; None unless
            asked.
    """

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
        PatchError: shapes or dtypes do not fit, a label is outside the vocabulary, the temperature is not
            positive, a block is empty.
    """
    _check(hidden, head, labels, tokens, vocabulary)
    flat = labels.reshape(-1)
    keep = flat != IGNORE
    wanted = flat[keep]
    total = head.shape[0]
    if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= total):
        worst = int(wanted.min()) if int(wanted.min()) < 0 else int(wanted.max())
        refuse(
            "logprobs",
            "labels",
            f"contain {worst}, and the vocabulary has {total} tokens.",
            "Mask with -100.",
        )
    scale = _scale(temperature, labels, keep)
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


def _check(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, tokens: int, vocabulary: int
) -> None:
    if head.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != head.shape[1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(head.shape)}"
        refuse("logprobs", "hidden, head", f"have the shapes {shapes}.", "Give [..., H] and [V, H].")
    if hidden.dtype != head.dtype or not hidden.is_floating_point():
        dtypes = f"{hidden.dtype} and {head.dtype}"
        refuse("logprobs", "hidden, head", f"have the dtypes {dtypes}.", "Give one floating-point dtype.")
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        problem = f"are {labels.dtype} of shape {tuple(labels.shape)}."
        refuse("logprobs", "labels", problem, f"Give int64 of shape {tuple(hidden.shape[:-1])}.")
    if tokens < 1 or vocabulary < 1:
        refuse("logprobs", "tokens, vocabulary", f"are {tokens} and {vocabulary}.", "Give positive sizes.")


def _scale(
    temperature: float | torch.Tensor, labels: torch.Tensor, keep: torch.Tensor
) -> float | torch.Tensor:
    """Return one over the temperature: a number, or one value per wanted token."""
    if isinstance(temperature, torch.Tensor):
        if temperature.ndim == 0:
            temperature = float(temperature)
        elif temperature.shape != labels.shape:
            problem = f"has the shape {tuple(temperature.shape)}."
            refuse("logprobs", "temperature", problem, f"Give a number or the shape {tuple(labels.shape)}.")
        else:
            chosen = temperature.reshape(-1)[keep]
            if not bool((chosen > 0).all()):
                refuse("logprobs", "temperature", "is not positive everywhere.", "Give positive values.")
            return chosen.reciprocal()
    if not 0 < temperature < float("inf"):
        refuse("logprobs", "temperature", f"is {temperature}.", "Give a positive number.")
    return 1.0 / temperature
