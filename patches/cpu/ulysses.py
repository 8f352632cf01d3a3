"""Run verl's Ulysses sequence parallelism with torch's own attention, for want of flash-attn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches

MONKEY_PATCH = "verl.models.transformers.monkey_patch"
IMPLEMENTATION = "sdpa"
"""The name under which transformers finds the attention that this exchanges."""


def attention(
    original: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend over the whole packed row, of which each rank of the sequence-parallel group holds a part.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509: before the attention every rank receives all tokens for its share
    of the heads, after it all heads for its share of the tokens. verl does so around flash-attn only.

    Args:
        original: transformers' attention, called if nothing is shared: without a group, or without
            ``position_ids``, as for a vision tower, which every rank computes whole.
        query, key, value: ``(1, heads, tokens / ranks, head_dim)``; key and value may have fewer heads.
        attention_mask: of the rank's own tokens; not used, since it says nothing of the others.
        kwargs: ``position_ids``, ``(1, tokens / ranks)``, which begin at 0 in every sequence, and
            ``sliding_window``, in tokens.

    Returns:
        ``(1, tokens / ranks, heads, head_dim)``, and no attention weights.
    """
    import torch
    from verl.utils import ulysses

    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    positions = kwargs.get("position_ids")
    if ranks == 1 or positions is None:
        return original(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    engine.record_call(Patches.of(ulysses_flash_attention_forward).id)
    copies = max(ranks // key.shape[1], 1)  # so that every rank has a head of the keys
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    group = ulysses.get_ulysses_sequence_parallel_group()
    query, key, value = (exchange(part, 1, 2, group) for part in (query, key, value))
    everyone = [torch.empty_like(positions) for _ in range(ranks)]
    torch.distributed.all_gather(everyone, positions.contiguous(), group=group)
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_mask(torch.cat(everyone, dim=-1)[0], kwargs.get("sliding_window")),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=True,
    )
    return exchange(out, 2, 1, group).transpose(1, 2).contiguous(), None


def exchange(part: Any, scatter: int, gather: int, group: Any) -> Any:
    """Return a tensor cut along ``scatter`` over the ranks, and joined along ``gather``; differentiable.

    verl's own ``SeqAllToAll`` calls ``all_to_all`` on lists, which gloo has in torch 2.13 and not in 2.11.
    """
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    pieces = torch.stack(part.tensor_split(torch.distributed.get_world_size(group), scatter))
    return torch.cat(tuple(all_to_all_single(torch.empty_like(pieces), pieces, group=group)), gather)


def causal_mask(positions: Any, window: int | None = None) -> Any:
    """Return which token sees which, ``(tokens, tokens)`` bool: the earlier ones of its own sequence. ``positions``,
    ``(tokens,)``, are 0 where a sequence begins; ``window``: tokens that one sees, itself included, None for all."""
    import torch

    sequence = (positions == 0).cumsum(0)
    at = torch.arange(len(positions), device=positions.device)
    back = at.unsqueeze(1) - at
    seen = (sequence.unsqueeze(1) == sequence) & (back >= 0)
    return seen if window is None else seen & (back < window)


@Patches("cpu", "verl>=0.9", scope="trainer", evidence="optional").register(
    f"{MONKEY_PATCH}:_ulysses_flash_attention_forward",
    params=("query_states", "key_states", "value_states", "attention_mask", "query_length"),
    relies_on=(
        "gather_seq_scatter_heads",
        "gather_heads_scatter_seq",
        "get_ulysses_sequence_parallel_world_size",
        "torch.distributed.all_gather",
        "verl.utils.ulysses:get_ulysses_sequence_parallel_group",
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    ),
    why="verl exchanges heads for tokens around flash-attn only; with sdpa each rank attends to its own part of "
    "the row, and nothing says so.",
    remove_when="verl's Ulysses covers sdpa.",
)
def ulysses_flash_attention_forward(site: Any) -> Callable[[], None]:
    """Do the same exchange around torch's attention, over the whole row, masked by where sequences begin."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = functools.partial(attention, original)
    return take_away


def take_away() -> None:
    """Put transformers' own attention back, unless other code exchanged it since."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    if isinstance(found, functools.partial) and found.func is attention:
        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = found.args[0]
