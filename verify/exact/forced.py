"""Run the trainer's model along an engine's forward pass, module by module.

Each module that both models have is given what the engine's module was given, and what the engine's returned goes on to the
next. So a difference shows where it arises and is carried no further. A router's logits go on too: the experts that they choose are
compared, whatever rounding did to the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from flashpatch.verify.exact.calls import Call, first_tensor, given_to
from flashpatch.verify.exact.experts import Parts, parts
from flashpatch.verify.exact.names import counterparts
from flashpatch.verify.exact.routers import ROUTER, decided, following, is_router, logits_of, unreached
from flashpatch.verify.exact.shards import HEAD

KINDS = ("", "scale", "offset", "a column's scale")
"""Ways in which values differ: by the norm of the difference as a part of theirs, or by what rounding, which knows no direction, does not
do: all of one module's are larger, each column has a part that is the same for all tokens, one column is larger."""


@dataclass(frozen=True)
class Gap:
    """A difference at one place.

    Attributes:
        place: "into NAME": between what the model's earlier modules returned and what the module was given; or "NAME": of
            what it returned.
        sizes: of the difference in each of `KINDS`.
        ranks: the first of them in the columns of each rank, where they are known.
        unreached: of a router's experts, those that no decided token chose, joined by commas.
        experts: of a block of experts, by expert its part in the difference.
    """

    place: str
    sizes: tuple[float, ...] = (0.0,) * len(KINDS)
    ranks: tuple[float, ...] = ()
    unreached: str = ""
    experts: Parts = field(default_factory=dict)

    @property
    def size(self) -> float:
        return self.sizes[0]


def gaps(model: torch.nn.Module, ids: list[int], engine: list[Call], logits: torch.Tensor) -> list[Gap]:
    """Return the difference at each place that both models have, in the order of the engine's calls.

    Args:
        model: the Hugging Face model; its dtype decides how exact the reference is.
        ids: the tokens of the one sequence that the engine was given.
        engine: its calls.
        logits: what it gave at each position but the last, [T - 1, V]; their place is "logits".
    """
    leading, order = pairs(model, len(ids), engine)
    found: dict[str, Gap] = {}
    state = _State(leading, found)
    hooks = [
        hook
        for name, module in model.named_modules()
        if name in leading
        for hook in state.attach(name, module)
    ]
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            ours = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, :-1]
    finally:
        for hook in hooks:
            hook.remove()
    owners = next((call.returned_by for call in engine if call.name == HEAD), None)
    state.note("logits", ours, logits[:, : ours.shape[1]], owners)
    return [found[place] for place in (*order, "logits") if place in found]


def pairs(
    model: torch.nn.Module, length: int, engine: list[Call]
) -> tuple[dict[str, tuple[Call, int]], list[str]]:
    """Return by module of ``model`` the engine's call that computes what it does, and the first of the call's columns that are its.

    Args:
        model: the Hugging Face model.
        length: of the one sequence.
        engine: calls of the other model.

    Returns:
        The pairs, and the names of the places in the order of the calls.
    """
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


def router_logits(model: torch.nn.Module, length: int, engine: list[Call]) -> dict[str, torch.Tensor]:
    """Return by router of ``model`` the logits of the engine's, [T, E]; see `pairs`."""
    leading, _ = pairs(model, length, engine)
    return {name: call.returned for name, (call, _) in leading.items() if ROUTER.search(name)}


class _State:
    def __init__(self, leading: Mapping[str, tuple[Call, int]], found: dict[str, Gap]) -> None:
        self.leading, self.found = leading, found
        #: Modules of the engine that are given something else than their namesakes.
        self.unlike: set[str] = set()
        #: By name of a block of experts, which tokens' are the same in both models.
        self.decided: dict[str, torch.Tensor] = {}
        #: By name of a block of experts, what these were given.
        self.experts_given: dict[str, tuple[Any, ...]] = {}

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
            ours = ours.reshape(theirs.shape)
            self.note(call.name, ours[kept], theirs[kept], owners)
            if name in self.experts_given and call.name in self.found:
                given, mine = self.experts_given.pop(name), ours.detach().float().cpu()
                found = parts(module.experts, given, mine, theirs, kept)
                self.found[call.name] = replace(self.found[call.name], experts=found)
            if routes:
                returned = following(module, args, kwargs, theirs)
                self.decided[name.rpartition(".")[0]] = decided(theirs, returned)
                left = ", ".join(map(str, unreached(theirs, returned)))
                self.found[call.name] = replace(self.found.get(call.name, Gap(call.name)), unreached=left)
                return returned
            goes_on = theirs.reshape(shape).to(ours)
            if not isinstance(returned, tuple):
                return goes_on if isinstance(returned, torch.Tensor) else None
            return tuple(goes_on if value is first else value for value in returned)

        def chosen(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self.experts_given[name] = (*args, *kwargs.values())

        hooks = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        if isinstance(experts := getattr(module, "experts", None), torch.nn.Module):
            hooks.append(experts.register_forward_pre_hook(chosen, with_kwargs=True))
        return hooks

    def note(
        self, place: str, ours: torch.Tensor, theirs: torch.Tensor, owners: torch.Tensor | None = None
    ) -> None:
        """Keep the difference at a place: the larger one, if modules of one name take part.

        Args:
            place: see `Gap`.
            ours, theirs: as many values each; where there are none, nothing is kept.
            owners: the rank of each column.
        """
        if ours.numel() != theirs.numel() or not ours.numel():
            return
        if not (ours.is_floating_point() and theirs.is_floating_point()):  # ids, or a mask
            return
        other = theirs.reshape(theirs.shape[0], -1)
        mine = ours.detach().float().cpu().reshape(other.shape)
        old = self.found.get(place, Gap(place))
        ranks = (
            []
            if owners is None
            else [owners[: other.shape[1]] == rank for rank in range(int(owners.max()) + 1)]
        )
        parts = [_sizes(mine[:, own], other[:, own])[0].item() for own in ranks]
        larger = tuple(max(pair) for pair in zip_longest(parts, old.ranks, fillvalue=0.0))
        sizes = torch.maximum(_sizes(mine, other), torch.tensor(old.sizes))
        self.found[place] = Gap(place, tuple(sizes.tolist()), larger)


def _sizes(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The difference in each of `KINDS`."""
    difference, whole = theirs - ours, ours.square().sum(0)
    energy = whole.sum().clamp(min=1e-30)
    along = (ours * difference).sum(0)
    least = energy / whole.numel() / 100  # columns of next to nothing are no reference
    constant = difference.mean(0).norm() * (len(ours) / energy) ** 0.5
    column = (along / whole.clamp(min=least)).abs().max()
    return torch.stack([difference.norm() / energy**0.5, along.sum().abs() / energy, constant, column])


def _with(args: tuple, kwargs: dict, given: torch.Tensor) -> tuple[tuple, dict]:
    """Replace the first floating tensor of the arguments by what the engine's module was given, if it fits."""
    replaced = False

    def swap(value: Any) -> Any:
        nonlocal replaced
        fits = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == given.numel()
        )
        if replaced or not fits or not given.is_floating_point():
            return value
        replaced = True
        return given.reshape(value.shape).to(value)

    return tuple(map(swap, args)), {key: swap(value) for key, value in kwargs.items()}
