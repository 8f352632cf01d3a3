"""Attend at a drafter's later draft steps, for all places of a row at once.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.1): the drafter is unrolled for several draft steps, and reads from
the second on what it has put out itself. A drafting that begins at row i has at its step j the keys of rows 0 to i, made
from the target's states, and those of its own steps 1 to j at row i. So beside the mask of the first step each later
step adds one key per row, its own: the diagonal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

CHUNK = 256
"""Rows whose attention scores are in memory at a time."""

Rotary = tuple[Tensor, Tensor]


class UnrolledAttention:
    """Hold the keys and values of a drafter's first step, and of its later steps as they come.

    Beside what a layer keeps for its gradients, a step keeps queries, keys and values, [T, heads * d] each; scores
    take ``heads * CHUNK * (CHUNK + longest window)`` numbers at a time, and are computed again for gradients.

    Args:
        attention: the layer's attention, Llama's or Qwen2's of transformers.
        inputs: [1, T, width], what it read at the first step.
        rotary: cosines and sines [1, T, d] of the first step's positions.
        mask: bool [1, 1, T, T], of the first step."""

    def __init__(self, attention: nn.Module, inputs: Tensor, rotary: Rotary, mask: Tensor) -> None:
        self.attention, self.mask = attention, mask[0, 0]
        _, self.keys, self.values = self._project(inputs, rotary)
        self._own_keys: list[Tensor] = []
        self._own_values: list[Tensor] = []
        self._chunks = list(_chunks(self.mask))

    def attend(self, inputs: Tensor, rotary: Rotary) -> Tensor:
        """Return the attention's output [1, T, H] at the next step, whose keys later steps see too."""
        queries, keys, values = self._project(inputs, rotary)
        self._own_keys.append(keys)
        self._own_values.append(values)
        own_keys, own_values = torch.stack(self._own_keys, 2), torch.stack(self._own_values, 2)
        found = []
        for rows, columns in self._chunks:
            found.append(
                checkpoint(
                    attend,
                    queries[:, :, rows],
                    self.keys[:, :, columns],
                    self.values[:, :, columns],
                    own_keys[:, :, :, rows],
                    own_values[:, :, :, rows],
                    self.mask[rows, columns],
                    self.attention.scaling,
                    use_reentrant=False,
                )
            )
        return self.attention.o_proj(torch.cat(found, 2)[0].transpose(0, 1).flatten(1))[None]

    def _project(self, inputs: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [1, heads, T, d], and keys and values [1, key heads, T, d]."""
        attention = self.attention
        shape = (*inputs.shape[:2], -1, attention.head_dim)
        queries, keys, values = (
            layer(inputs).view(shape).transpose(1, 2)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return *apply_rotary_pos_emb(queries, keys, *rotary), values


def _chunks(mask: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield rows, `CHUNK` at a time, and the columns that any of them sees; windows are side by side, so these are few."""
    seen = [mask[start : start + CHUNK].any(0).nonzero()[[0, -1], 0] for start in range(0, len(mask), CHUNK)]
    for number, (first, last) in enumerate(torch.stack(seen).tolist()):
        yield slice(number * CHUNK, (number + 1) * CHUNK), slice(first, last + 1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    mask: Tensor,
    scaling: float,
) -> Tensor:
    """Attend from each row to common keys under a mask, and to keys of its own.

    Args:
        queries: [1, heads, rows, d].
        keys, values: [1, key heads, T, d], of the first step; each serves ``heads / key heads`` heads.
        own_keys, own_values: [1, key heads, steps, rows, d].
        mask: bool [rows, T].
        scaling: of the products.

    Returns:
        [1, heads, rows, d]."""
    count, key_heads = queries.shape[1], keys.shape[1]
    precise = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.unflatten(1, (key_heads, count // key_heads))
    common = (grouped @ keys[:, :, None].mT).to(precise).masked_fill(~mask, float("-inf"))
    own = torch.einsum("bkgrd,bksrd->bkgrs", grouped, own_keys).to(precise)
    weights = (torch.cat((common, own), -1) * scaling).softmax(-1).to(queries.dtype)
    length = keys.shape[2]
    found = weights[..., :length] @ values[:, :, None]
    found = found + torch.einsum("bkgrs,bksrd->bkgrd", weights[..., length:], own_values)
    return found.flatten(1, 2)
