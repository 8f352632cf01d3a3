"""Run verl's Ulysses sequence parallelism with torch's own attention, for want of flash-attn."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.cpu.platform import IMPL

MONKEY_PATCH = "verl.models.transformers.monkey_patch"
IMPLEMENTATION = "sdpa"
"""The name under which transformers finds the attention that this exchanges."""
ROW = "_flashpatch_row"
"""Attribute of a layer of a model whose ranks share a row: the positions that the model got last."""
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
        kwargs: ``position_ids``, ``(1, tokens / ranks)``, from 0 in every sequence, unless the model got those of as many tokens
            (`build_module`), and ``sliding_window``, in tokens.

    Returns ``(1, tokens / ranks, heads, head_dim)``, and no attention weights. Raises PatchError in a causal layer without positions,
    or with another mask than of earlier tokens in a window, and for what flash-attn, verl's default, would do and this cannot.
    """
    import torch
    from verl.utils import ulysses

    if lost := [name for name in _flash_alone(original) if kwargs.get(name) is not None]:
        raise PatchError(
            f"{type(module).__name__} attends with {lost[0]}, which torch's attention leaves out.",
            **patches.at(build_module),
            advice="Set +actor_rollout_ref.model.override_config.attn_implementation=eager.",
        )
    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    positions, row = kwargs.get("position_ids"), getattr(module, ROW, None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if positions is None and causal and row is not None and row.shape == (1, query.shape[2]):
        positions = row
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


@functools.cache
def _flash_alone(sdpa: Callable) -> set[str]:
    """Return what changes the result of transformers' flash attention, by keyword, and torch's does not know."""
    from transformers.integrations.flash_attention import flash_attention_forward

    known = inspect.signature(sdpa).parameters.keys() | {"sliding_window"}  # which is in the mask
    return inspect.signature(flash_attention_forward).parameters.keys() - known


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
    relies_on=("self.ulysses_sequence_parallel_size", "self.use_remove_padding"),
    why="Some models do not tell their attention where the sequences of a packed row begin; some attend by functions of their own, "
    "or have layers that see a rank's part of the row alone.",
    remove_when="verl's Ulysses covers these, or refuses them, and transformers' torch attention asks for positions.",
)
def build_module(original, self) -> Any:
    """Refuse a model that mixes packed sequences. With Ulysses, refuse one whose layers would see a rank's part of the row alone,
    and keep for each layer the positions of the row."""
    module = original(self)
    if self.ulysses_sequence_parallel_size > 1:
        if why := _alone(layers := list(module.modules()), _kinds(module)):
            raise _refusal(f"{type(module).__name__} {why}")
        for one in {module, getattr(module, "base_model", module)}:  # LoRA calls the base alone
            one.register_forward_pre_hook(functools.partial(_note, layers), with_kwargs=True)
    elif self.use_remove_padding and module.device.type != "meta":  # rank 0 holds values
        _refuse_mixing(module)
    return module


def _refuse_mixing(model: Any) -> None:
    """Raise PatchError if the second of two sequences comes out otherwise behind another first one, or may be cut by it."""
    import torch

    base, ids = getattr(model, "base_model", model), torch.arange(12)[None]
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    rows = ids, torch.where(torch.arange(12) < 7, ids + 12, ids)
    with torch.no_grad():
        one, two = [base(input_ids=row, position_ids=positions, use_cache=False)[0][:, 7:] for row in rows]
    differs = (
        one - two
    ).abs().max() > 0.02 * one.std()  # rounding is less, another sequence's tokens far more
    if differs or "chunked_attention" in _kinds(model):  # Llama 4's chunks are of the row
        raise PatchError(
            f"{type(model).__name__} mixes, or cuts by the row, the sequences that verl packs into one.",
            **patches.at(build_module),
            advice="Set actor_rollout_ref.model.use_remove_padding=False.",
        )


def _kinds(model: Any) -> Sequence[str]:
    """Return the kinds of layers that a model's configuration names, of one with images its text's."""
    return getattr(model.config.get_text_config(), "layer_types", None) or ()


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


def _note(layers: list[Any], module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note a packed row's positions: of several kinds, for images, the first of four are the tokens'."""
    row = kwargs.get("position_ids")
    if row is not None:
        row = row if row.dim() == 2 else row[0] if len(row) == 4 else None
        for one in layers:
            setattr(one, ROW, row)


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
