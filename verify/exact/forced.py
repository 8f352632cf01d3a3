"""Run the trainer's model along an engine's forward pass, module by module.

Each module that both models have is given what the engine's module was given, and what the engine's returned goes on to the
next. So a difference shows where it arises and is carried no further. A router's logits go on too: the experts that they choose are
compared, whatever rounding did to the choice.

Where routers let each expert have its turn, it is compared by the tokens whose turn it was: it makes most of what these get."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from flashpatch.verify.exact.calls import Call, first_tensor, given_to, hooked
from flashpatch.verify.exact.routers import ROUTER, decided, following, is_router, logits_of, turns
from flashpatch.verify.exact.shards import HEAD

#: The model, modules that hold others and give back the stream in parts, take other arguments than their namesakes, have their
#: columns in another order (BLOOM's, head by head), or apply their gate themselves (Qwen's shared expert).
_OTHERWISE = re.compile(
    r"^$|(^|\.)(model|layers\.\d+|experts|shared_expert|act_fn|rotary_emb|query_key_value)$"
)
#: A mixer of vLLM's in a wrapper of the same name, which scales what it is given (Falcon-H1); Hugging Face's does that itself.
_WRAPPED = re.compile(r"(?<=\.mamba)\.mamba(?=\.)")
#: Modules of vLLM and SGLang that compute several of Hugging Face's at once.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Names that engines kept and transformers changed: of a block of experts, and of the router in it.
_RENAMED = ((re.compile(r"\.block_sparse_moe\b"), ".mlp"), (re.compile(r"\.gate$"), ".router"))
COLUMN = "a column's "
OFFSET = f"{COLUMN}offset"
_WAYS = ("", "scale", "offset", f"{COLUMN}scale", OFFSET)
STEPPED = "in decode steps"
KINDS = (*_WAYS, *(", ".join(filter(None, (way, STEPPED))) for way in _WAYS))
"""Ways in which values differ: by the norm of the difference as a part of theirs, or by what rounding, which knows no direction, does not
do: all of one module's are larger, each column has a part that is the same for all tokens, one column is larger, or has a large such
part; and the same of tokens that had steps of their own."""


@dataclass(frozen=True)
class Part:
    """How a sequence was read: so many positions apart, its last tokens in so many steps of their own, each expert in turn, beside others."""

    stride: int = 1
    steps: int = 0
    turns: bool = False
    beside: bool = False


WHOLE = Part()


@dataclass(frozen=True)
class Gap:
    """A difference at one place: "into NAME", between what the model's earlier modules returned and what the module was given,
    or "NAME", of what it returned.

    Its ``sizes`` are those of `KINDS`, ``ranks`` the same in the columns of each rank, where they are known. Of a
    block whose experts had turns, ``experts`` has the sizes of each that was reached, and ``count`` is how many there are."""

    place: str
    sizes: tuple[float, ...] = (0.0,) * len(KINDS)
    ranks: tuple[tuple[float, ...], ...] = ()
    experts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    count: int = 0

    @property
    def size(self) -> float:
        return self.sizes[0]


def gaps(
    model: torch.nn.Module, ids: list[int], engine: list[Call], logits: torch.Tensor, part: Part = WHOLE
) -> list[Gap]:
    """Return the difference at each place that both models have, in the order of the engine's calls.

    The dtype of the Hugging Face ``model`` decides how exact the reference is. ``ids`` is the one sequence that the engine was
    given, ``logits`` what it gave at each position but the last, [T - 1, V], whose place is "logits"; ``part`` says how it was read.
    """
    leading, order = pairs(model, len(ids), engine)
    found: dict[str, Gap] = {}
    state = _State(leading, found, len(ids), part)
    known = dict(model.named_modules())
    hooks = [hook for name in known if name in leading for hook in state.attach(name, known[name])]
    with hooked(hooks):
        ours = forward(model, ids, part)
    owners = next((call.returned_by for call in engine if call.name == HEAD), None)
    last = slice(len(ours) - len(logits), len(ours))
    state.note("logits", ours[last], logits[:, : ours.shape[1]], owners, state.stepped[last])
    return [found[place] for place in (*order, "logits") if place in found]


def forward(model: torch.nn.Module, ids: list[int], part: Part = WHOLE) -> torch.Tensor:
    """Return the model's logits at each position but the last, [T - 1, V]."""
    row = torch.tensor([ids], device=next(model.parameters()).device)
    places = torch.arange(len(ids), device=row.device)[None] * part.stride
    far = {"position_ids": places, "attention_mask": torch.ones_like(row)} if part.stride > 1 else {}
    with torch.no_grad():
        return model(input_ids=row, use_cache=False, **far).logits[0, :-1]


def pairs(
    model: torch.nn.Module, length: int, engine: list[Call]
) -> tuple[dict[str, tuple[Call, int]], list[str]]:
    """Return by module of ``model`` the engine's call that computes what it does, and the first of the call's columns that are
    its.

    Beside these, the names of the places in the order of the calls. ``length`` is that of the one sequence."""
    known = {name for name, _ in model.named_modules()}
    called = {call.name for call in engine}
    leading: dict[str, tuple[Call, int]] = {}
    order: list[str] = []
    for call in engine:
        names = counterparts(call.name, known, called)
        if not names or not call.returned.numel() or call.returned.shape[0] != length or names[0] in leading:
            continue
        order += [f"into {call.name}", call.name]
        start = 0
        for name in names:
            leading[name] = (call, start)
            start += getattr(model.get_submodule(name), "out_features", 0)
    return leading, order


def counterparts(name: str, known: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules that compute together what the engine's module ``name`` does; () if there are none.

    ``known`` are the names of all modules of the Hugging Face model, ``called`` of the engine's."""
    wrapped = f"{name}.{name.rpartition('.')[2]}"
    if _OTHERWISE.search(name) or wrapped in called:
        return ()
    for one in spellings(name):
        if one in known:
            return (one,)
        parent, _, last = one.rpartition(".")
        parts = tuple(f"{parent}.{part}" for part in FUSED.get(last, ()))
        if parts and set(parts) <= set(known):
            return parts
    return ()


def spellings(name: str) -> list[str]:
    """Return the names that a place of the engine may have in the Hugging Face model."""
    found = [_WRAPPED.sub("", name)]
    for pattern, other in _RENAMED:
        found += [pattern.sub(other, one) for one in found if pattern.search(one)]
    return found


def router_logits(model: torch.nn.Module, length: int, engine: list[Call]) -> dict[str, torch.Tensor]:
    """Return by router of ``model`` the logits of the engine's, [T, E]; see `pairs`."""
    leading, _ = pairs(model, length, engine)
    return {name: call.returned for name, (call, _) in leading.items() if ROUTER.search(name)}


class _State:
    def __init__(
        self, leading: Mapping[str, tuple[Call, int]], found: dict[str, Gap], length: int, part: Part
    ) -> None:
        self.leading, self.found, self.part = leading, found, part
        self.stepped = torch.arange(length) >= length - part.steps
        #: Modules of the engine that are given something else than their namesakes.
        self.unlike: set[str] = set()
        #: By name of a block of experts, which tokens' are the same in both models.
        self.decided: dict[str, torch.Tensor] = {}
        #: By name of a block of experts, how many there are, and whose turn each token is.
        self.turns: dict[str, tuple[int, torch.Tensor]] = {}

    def attach(self, name: str, module: torch.nn.Module) -> list[Any]:
        call, start = self.leading[name]

        def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            incoming, parts = given_to(module, args, kwargs)
            # Some norms are given heads first, some modules a residual that their namesakes are not.
            in_rows = incoming.dim() < 2 or call.given.shape[0] in incoming.shape[:2]
            alike = incoming.numel() == call.given.numel() and parts == call.parts
            if not alike or not in_rows or "Scaled" in type(module).__name__:
                self.unlike.add(call.name)
                return args, kwargs
            if start == 0:
                self.note(f"into {call.name}", incoming, call.given, call.given_by)
            return _with(args, kwargs, call.given)

        def after(module: torch.nn.Module, args: tuple, kwargs: dict, returned: Any) -> Any:
            if call.name in self.unlike:
                return None
            routes = is_router(name, returned)
            ours = first = logits_of(returned) if routes else first_tensor(returned)
            rows = call.returned.reshape(call.returned.shape[0], -1)
            width = ours.numel() // rows.shape[0]
            theirs = rows[:, start : start + width]
            if theirs.numel() != ours.numel():
                return None
            shape, owners = ours.shape, call.returned_by
            owners = None if owners is None else owners[start : start + width]
            kept = self.decided.get(name, slice(None))
            ours = ours.detach().float().cpu().reshape(theirs.shape)
            if not (self.part.turns and ROUTER.search(name)):
                self.note(call.name, ours[kept], theirs[kept], owners, self.stepped[kept])
            if name in self.turns and call.name in self.found:
                count, whose = self.turns[name]
                each = {one: whose == one for one in whose.unique().tolist() if one >= 0}
                found = {one: _sizes(ours[own], theirs[own]) for one, own in each.items()}
                self.found[call.name] = replace(self.found[call.name], experts=found, count=count)
            block, is_turn = name.rpartition(".")[0], self.part.turns and bool(ROUTER.search(name))
            if routes:
                returned = following(module, args, kwargs, theirs)
                self.decided[block] = decided(theirs, returned)
            if is_turn:
                self.turns[block] = theirs.shape[-1], turns(theirs, returned if routes else ())
            if routes:
                return returned
            goes_on = theirs.reshape(shape).to(ours)
            if not isinstance(returned, tuple):
                return goes_on if isinstance(returned, torch.Tensor) else None
            return tuple(goes_on if value is first else value for value in returned)

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [*hooks, module.register_forward_hook(after, with_kwargs=True)]

    def note(
        self,
        place: str,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        owners: torch.Tensor | None = None,
        stepped: torch.Tensor | None = None,
    ) -> None:
        """Keep the difference of as many values at a place, see `Gap`: the larger one, if modules of one name take part.

        ``owners`` are the ranks of the columns, ``stepped`` the rows of decode steps. Where there are no values, nothing is kept.
        """
        if ours.numel() != theirs.numel() or not ours.numel():
            return
        if not (ours.is_floating_point() and theirs.is_floating_point()):  # ids, or a mask
            return
        other = theirs.reshape(theirs.shape[0], -1)
        mine = ours.detach().float().cpu().reshape(other.shape)
        old, none = self.found.get(place, Gap(place)), Gap(place).sizes
        count = 0 if owners is None else int(owners.max()) + 1
        columns = [slice(None), *(owners[: other.shape[1]] == rank for rank in range(count))]
        own = self.stepped[: len(other)] if stepped is None else stepped
        if len(own) != len(other) or (stepped is None and len(own) < len(self.stepped) - 1):  # heads first
            own = torch.zeros(len(other), dtype=torch.bool)
        whole, *parts = (
            _sizes(mine[~own][:, at], other[~own][:, at]) + _sizes(mine[own][:, at], other[own][:, at])
            for at in columns
        )
        ranks = [_larger(*pair) for pair in zip_longest(parts, old.ranks, fillvalue=none)]
        self.found[place] = Gap(place, _larger(whole, old.sizes), tuple(ranks))


def _larger(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(torch.maximum(torch.tensor(one), torch.tensor(other)).tolist())


def _sizes(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, ...]:
    """Return by how much rows of values differ in each of `_WAYS`: not at all where there are none."""
    if not ours.numel():
        return (0.0,) * len(_WAYS)
    difference, whole = theirs - ours, ours.square().sum(0)
    energy = whole.sum().clamp(min=1e-30)
    along = (ours * difference).sum(0)
    least = energy / whole.numel() / 100  # columns of next to nothing are no reference
    scale, offset = along.sum().abs() / energy, difference.mean(0) * (len(ours) / energy) ** 0.5
    columns = (along / whole.clamp(min=least)).abs().max(), offset.abs().max() * whole.numel() ** 0.5
    sizes = torch.stack([difference.norm() / energy**0.5, scale, offset.norm(), *columns])
    return tuple(sizes.tolist())


def _with(args: tuple, kwargs: dict, given: torch.Tensor) -> tuple[tuple, dict]:
    """Replace the first floating tensor of the arguments by what the engine's module was given, if it fits."""
    replaced = False

    def swap(value: Any) -> Any:
        nonlocal replaced
        fits = isinstance(value, torch.Tensor) and value.numel() == given.numel()
        if replaced or not (fits and value.is_floating_point() and given.is_floating_point()):
            return value
        replaced = True
        return given.reshape(value.shape).to(value)

    return tuple(map(swap, args)), {key: swap(value) for key, value in kwargs.items()}
