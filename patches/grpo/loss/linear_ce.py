"""Compute linear layer, softmax and cross entropy in one differentiable function without all logits.

Forward keeps, per token, a running maximum and running sums over blocks of the vocabulary (the online softmax of Milakov
and Gimelshein, 2018). Backward computes each block of logits again. Blocks of the vocabulary are the outer loop, so that
a block of the head is widened once and its gradient is complete when the loop leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """Hold the block sizes of the computation.

    Attributes:
        tokens, vocabulary: largest block.
        entropy: whether to return it besides log-probabilities."""

    tokens: int
    vocabulary: int
    entropy: bool


class LinearCrossEntropy(torch.autograd.Function):
    """``apply(hidden [T, H], head [V, H], labels [T], scale, shape)`` gives logprobs, entropy."""

    @staticmethod
    def forward(ctx: Any, hidden, head, labels, scale, shape: Shape):
        with _exact(hidden):
            wide = _times(_wide(hidden), scale)
            top, total, weighted, target = _sweep(wide, head, labels, shape)
            norm = total.log().add_(top)
            entropy = norm - weighted / total if shape.entropy else None
        ctx.save_for_backward(hidden, head, labels, norm, entropy)
        ctx.scale, ctx.shape = scale, shape
        ctx.set_materialize_grads(False)
        return target - norm, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up, up_entropy):
        hidden, head, labels, norm, entropy = ctx.saved_tensors
        shape: Shape = ctx.shape
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        if up is None and up_entropy is None:
            return (None,) * 5
        with _exact(hidden):
            wide = _times(_wide(hidden), ctx.scale)
            into_hidden = torch.zeros_like(wide) if needs_hidden else None
            into_head = torch.empty_like(head) if needs_head else None
            for rows in _blocks(head.shape[0], shape.vocabulary):
                part = _wide(head[rows])
                sums = torch.zeros_like(part) if needs_head else None
                for block in _blocks(wide.shape[0], shape.tokens):
                    slope = _slope(wide, part, labels, norm, entropy, up, up_entropy, rows.start, block)
                    if into_hidden is not None:
                        into_hidden[block].addmm_(slope, part)
                    if sums is not None:
                        sums.addmm_(slope.t(), wide[block])
                if into_head is not None:
                    into_head[rows] = sums
            if into_hidden is not None:
                into_hidden = _times(into_hidden, ctx.scale).to(hidden.dtype)
        return into_hidden, into_head, None, None, None


def _sweep(wide, head, labels, shape: Shape):
    """Return running sums over the rows of the head, each [T]: the maximum, the sum of exponentials relative
    to it, their sum weighted with the logits, the label's logit."""
    count = wide.shape[0]
    top = wide.new_full((count,), float("-inf"))
    total, target = wide.new_zeros(count), wide.new_zeros(count)
    weighted = wide.new_zeros(count) if shape.entropy else None
    for rows in _blocks(head.shape[0], shape.vocabulary):
        part = _wide(head[rows])
        for block in _blocks(count, shape.tokens):
            logits = wide[block] @ part.t()
            local, here = _local(labels[block], rows.start, logits.shape[1])
            target[block] += logits.gather(1, local).squeeze(1) * here
            new = torch.maximum(top[block], logits.amax(1))
            fade = (top[block] - new).exp_()
            top[block] = new
            logits.sub_(new[:, None])
            powers = logits.exp() if weighted is not None else logits.exp_()
            sums = powers.sum(1)
            total[block] = total[block] * fade + sums
            if weighted is not None:
                # The sum of exp(z - top) * z, from z - top, which is what the block holds now.
                moment = torch.linalg.vecdot(powers, logits) + new * sums
                weighted[block] = weighted[block] * fade + moment
    return top, total, weighted, target


def _slope(wide, part, labels, norm, entropy, up, up_entropy, first: int, block: slice):
    """Return the gradient of one block of logits, [t, v].

    d logprob / d z_j = 1[j is the label] - p_j, and d entropy / d z_j = -p_j (log p_j + entropy)."""
    logs = (wide[block] @ part.t()).sub_(norm[block, None])
    if up_entropy is None:
        slope = logs.exp_().mul_(-up[block, None])
    else:
        powers = logs.exp()
        slope = logs.add_(entropy[block, None]).mul_(-up_entropy[block, None])
        if up is not None:
            slope.sub_(up[block, None])
        slope.mul_(powers)
    if up is not None:
        local, here = _local(labels[block], first, slope.shape[1])
        slope.scatter_add_(1, local, (up[block] * here)[:, None])
    return slope


def _local(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of labels in a block, [t, 1] (0 for others), and which labels are in it."""
    at = labels - first
    here = (at >= 0) & (at < width)
    return at.clamp(0, width - 1)[:, None], here


def _blocks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _times(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return values * scale.to(values.dtype)[:, None]
    return values if scale == 1.0 else values * scale


def _exact(like: torch.Tensor) -> Any:
    """Disable autocast, which would narrow the widened values."""
    return torch.autocast(like.device.type, enabled=False)
