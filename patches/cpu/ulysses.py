"""Run verl's Ulysses sequence parallelism with torch's own attention, for want of flash-attn."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.cpu.platform import IMPL

MONKEY_PATCH = "verl.models.transformers.monkey_patch"
IMPLEMENTATION = "sdpa"
"""The name under which transformers finds the attention that this exchanges."""
POSITIONS = "_flashpatch_positions"
"""Attribute of a layer that takes ``position_ids`` as an argument of its own, and need not pass it on: what it got last."""
WINDOW = "_flashpatch_window"
"""Attribute of a mask that transformers made: the window that it was made for, None for all earlier tokens."""

patches = Patches("cpu", "verl>=0.9", scope="trainer", evidence="optional")


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
        original: transformers' attention, called if nothing is shared: without a group, or, without positions, in a layer
            that is not causal, as of a vision tower, which every rank computes whole.
        query, key, value: ``(1, heads, tokens / ranks, head_dim)``; key and value may have fewer heads.
        attention_mask: of the rank's own tokens. It says nothing of the others, but for its window (`stated_mask`).
        kwargs: ``position_ids``, ``(1, tokens / ranks)``, from 0 in every sequence, if not those that the layer was given itself
            (`build_module`), and ``sliding_window``, in tokens.

    Returns ``(1, tokens / ranks, heads, head_dim)``, and no attention weights. Raises PatchError in a causal layer without positions,
    or with another mask than of earlier tokens in a window.
    """
    import torch
    from verl.utils import ulysses

    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    positions = kwargs.get("position_ids", getattr(module, POSITIONS, None))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if ranks == 1 or (positions is None and not causal):
        named = dict(dropout=dropout, scaling=scaling, is_causal=is_causal)
        return original(module, query, key, value, attention_mask, **named, **kwargs)
    if positions is None:
        raise _refusal(f"{type(module).__name__} attends without the positions of its row's tokens")
    if not causal:
        raise _refusal(f"{type(module).__name__} is not causal")
    window = kwargs.get("sliding_window") if attention_mask is None else getattr(attention_mask, WINDOW, -1)
    if attention_mask is not None and not _is_of(attention_mask, positions[0], window):
        raise _refusal(f"{type(module).__name__} has a mask of its own")
    engine.record_call(Patches.of(ulysses_flash_attention_forward).id)
    copies = max(ranks // key.shape[1], 1)  # so that every rank has a head of the keys
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    group = ulysses.get_ulysses_sequence_parallel_group()
    query, key, value = (exchange(part, 1, 2, group) for part in (query, key, value))
    everyone = [torch.empty_like(positions) for _ in range(ranks)]
    torch.distributed.all_gather(everyone, positions.contiguous(), group=group)
    mask = causal_mask(torch.cat(everyone, dim=-1)[0], window)
    how = dict(attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **how)
    return exchange(out, 2, 1, group).transpose(1, 2).contiguous(), None


def exchange(part: Any, scatter: int, gather: int, group: Any) -> Any:
    """Return a tensor cut along ``scatter`` over the ranks, and joined along ``gather``; differentiable.

    verl's own ``SeqAllToAll`` calls ``all_to_all`` on lists, which gloo has in torch 2.13 and not in 2.11."""
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


def stated_mask(original: Any, *args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return the mask that transformers makes for a layer's kind, also where it would leave it out as torch needs none, with
    the window ``local_size`` that it was made for."""
    from verl.utils import ulysses

    if ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        kwargs["allow_is_causal_skip"] = False
    mask = original(*args, local_size=local_size, **kwargs)
    if mask is not None:
        setattr(mask, WINDOW, local_size)
    return mask


def _is_of(mask: Any, positions: Any, window: int | None) -> bool:
    """Whether a mask, ``(1, 1, tokens, tokens)`` bool, is that of transformers for the earlier tokens in a window, of one's own
    sequence or of the row: not all models say where sequences begin."""
    import torch

    rows = (positions, torch.arange(len(positions), device=positions.device))
    return window != -1 and any(torch.equal(mask[0, 0], causal_mask(row, window)) for row in rows)


@patches.wrap(
    f"{IMPL}:FSDPEngine._build_module",
    relies_on="self.ulysses_sequence_parallel_size",
    why="Some attention takes position_ids as an argument of its own and passes it to nothing; some models attend by functions "
    "of their own, or have layers that see a rank's part of the row alone.",
    remove_when="verl's Ulysses covers these, or refuses them.",
)
def build_module(original, self) -> Any:
    """With Ulysses, keep for each layer the positions that it takes as an argument of its own; refuse a model whose layers
    would see a rank's part of the row alone."""
    module = original(self)
    if self.ulysses_sequence_parallel_size > 1:
        if why := _alone(layers := list(module.modules()), getattr(module.config, "layer_types", None) or ()):
            raise _refusal(f"{type(module).__name__} {why}")
        for one in layers:
            if "position_ids" in inspect.signature(one.forward).parameters:
                one.register_forward_pre_hook(_note, with_kwargs=True)
    return module


def _alone(layers: list[Any], kinds: Iterable[str] = ()) -> str:
    """Say why layers of a model of transformers, the model first, see a rank's part of the row alone; "" if none does. ``kinds``
    are the kinds of layers that its configuration names."""
    from torch.nn import Conv1d

    if getattr(layers[0], "_is_stateful", False) or any(isinstance(one, Conv1d) for one in layers):
        return "has a state or a convolution over the row"
    kinds_of_positions = " ".join(str(getattr(one, "rope_type", "")) for one in layers)
    if "dynamic" in kinds_of_positions or "longrope" in kinds_of_positions:
        return "turns positions by the row's length"
    if others := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        return f"has layers of kind {', '.join(others)}"
    shared = any(hasattr(sys.modules[type(one).__module__], "ALL_ATTENTION_FUNCTIONS") for one in layers)
    return "" if shared else "attends by functions of its own"


def _note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    setattr(module, POSITIONS, kwargs.get("position_ids"))


def _refusal(why: str) -> PatchError:
    advice = "Set ulysses_sequence_parallel_size to 1."
    return PatchError(f"cannot share a row between ranks: {why}.", **patches.at(build_module), advice=advice)


@patches.register(
    f"{MONKEY_PATCH}:_ulysses_flash_attention_forward",
    params=("query_states", "key_states", "value_states", "attention_mask", "query_length"),
    relies_on=(
        "gather_seq_scatter_heads",
        "gather_heads_scatter_seq",
        "get_ulysses_sequence_parallel_world_size",
        "torch.distributed.all_gather",
        "verl.utils.ulysses:get_ulysses_sequence_parallel_group",
        "transformers.modeling_utils:AttentionInterface.register",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward",
        "transformers.masking_utils:AttentionMaskInterface.register",
        "transformers.masking_utils:sdpa_mask",
    ),
    why="verl exchanges heads for tokens around flash-attn only; with sdpa each rank attends to its own part of "
    "the row, and nothing says so.",
    remove_when="verl's Ulysses covers sdpa.",
)
def ulysses_flash_attention_forward(site: Any) -> Callable[[], None]:
    """Do the same exchange around torch's attention, over the whole row, masked by where sequences begin."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    ours = ((AttentionInterface, attention), (AttentionMaskInterface, stated_mask))
    for known, one in ours:  # some models have an instance of their own
        known.register(IMPLEMENTATION, functools.partial(one, known()[IMPLEMENTATION]))

    def take_away() -> None:
        for known, one in ours:
            found = known()[IMPLEMENTATION]
            if isinstance(found, functools.partial) and found.func is one:  # no other code's since
                known.register(IMPLEMENTATION, found.args[0])

    return take_away
