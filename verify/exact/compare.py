"""Compare an engine with the model that a trainer trains: distributions at every position, then module by module."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import repeat

import torch

from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.certificate import DISTRIBUTIONS, Certificate, Place
from flashpatch.verify.exact.distributions import likeliest, logits, mean_kl
from flashpatch.verify.exact.engine import Pass
from flashpatch.verify.exact.forced import KINDS, Gap, gaps, pairs, router_logits
from flashpatch.verify.exact.names import FUSED, counterparts, spellings
from flashpatch.verify.exact.noise import rounded
from flashpatch.verify.exact.routers import choosing
from flashpatch.verify.exact.shards import some
from flashpatch.verify.exact.turns import gaps as far

_NUMBER = re.compile(r"\.\d+(?=\.)")  # of a layer
FACTOR = 4.0
FLOOR = 2.0**-8
"""A place differs if its gap is more than `FACTOR` times what rounding alone gives there, and more than `FLOOR`, bf16's spacing.

A KL grows with the square of a gap, and so do its factor and its floor."""
TURNED = FACTOR * FLOOR
"""A rotary place differs by more: an engine's cosines are in bf16, angles far out in float32."""


def compare(load: Callable[[torch.dtype], torch.nn.Module], ids: list[int], engine: Pass) -> Certificate:
    """Compare one prefill of an engine with the trainer's model.

    Args:
        load: returns the Hugging Face model in a dtype, on any device, in evaluation mode.
        ids: the tokens that the engine was given.
        engine: what it did.
    """
    if engine.problem or not engine.logits.numel():
        problem = engine.problem or "the engine gave no logits of the prompt"
        return Certificate([], problem=f"cannot compare here: {problem}")
    small = load(torch.bfloat16)
    # Recorded first, so that a module is given what it then rounds, as an engine's is.
    with recorded(small) as calls, rounded(small, engine.quantization):
        near = logits(small, ids)
    del small  # one model in memory at a time
    exact = load(torch.float32)
    is_compiled = len(engine.calls) == 1  # the head's
    found = [] if is_compiled else gaps(exact, ids, engine.calls, engine.logits)
    if len(found) < 2 and not is_compiled:
        return Certificate([], problem="cannot compare: no module of both models has the same name")
    wanted = logits(exact, ids)
    same = pairs(exact, len(ids), engine.calls)[0]  # the same modules, so that the same lies between them
    calls = [call for call in calls if call.name in same]
    rounding = {gap.place: gap.sizes for gap in gaps(exact, ids, calls, near)}
    places = [_place(gap, rounding) for gap in found]
    blind = [place.name for place in places if place.bound >= 1]
    if blind and not engine.quantization:
        problem = f"the trainer's own model in bf16 and in float32 have nothing in common at {blind[0]}"
        return Certificate(places, problem=f"cannot compare here: {problem}")
    # Ranks that disagree come first, as what follows is compared with the first rank's.
    places = _ordered([*engine.apart, *places], engine.calls)
    turned = [
        Place(name, gap, TURNED, "", f"to position {end}") for name, end, gap in far(exact, engine.turns)
    ]
    places += turned
    kl, largest = mean_kl(wanted, engine.logits), likeliest(wanted, engine.logits)
    kl_rounding, largest_rounding = mean_kl(wanted, near), likeliest(wanted, near)
    bound = max(FACTOR**2 * kl_rounding, FLOOR**2)
    if kl > bound and not any(place.differs for place in places):
        bound += _by_choice(exact, ids, engine.calls, wanted)
    # The last place: a difference that no module has that is compared.
    places.append(Place(DISTRIBUTIONS, kl, bound))
    known, called = {name for name, _ in exact.named_modules()}, {call.name for call in engine.calls}
    names = [_NUMBER.sub(".*", name) for name in engine.left if counterparts(name, known, called)]
    left = [f"{name}, which cannot be joined from its ranks" for name in dict.fromkeys(names)]
    left += [f"{gap.place}'s experts {gap.unreached}, which no token took" for gap in found if gap.unreached]
    if not turned and any("rotary_emb" in name for name in known):
        left.append("rotary positions beyond the prompt, of which the engine has no table like the trainer's")
    return Certificate(
        *(places, kl, kl_rounding, largest, largest_rounding),
        quantization=engine.quantization,
        left_out=tuple(left),
    )


def _by_choice(model: torch.nn.Module, ids: list[int], calls: list[Call], wanted: torch.Tensor) -> float:
    """The KL that comes with the experts that the engine's routers chose, whichever it took of those with equal logits."""
    routers = router_logits(model, len(ids), calls)
    found = 0.0
    for later in (False, True) if routers else ():
        with choosing(model, routers, later):
            found += mean_kl(wanted, logits(model, ids))
    return found


def _place(gap: Gap, rounding: dict[str, tuple[float, ...]]) -> Place:
    noise = _noise(gap.place, rounding)
    bounds = [max(FACTOR * size, FLOOR, noise[0] / FACTOR * bool(kind)) for kind, size in zip(KINDS, noise)]
    differing = [rank for rank, size in enumerate(gap.ranks) if not size <= bounds[0]]
    whole = Place(gap.place, gap.size, bounds[0], some(differing, len(gap.ranks)))
    of_kinds = (Place(gap.place, *each) for each in zip(gap.sizes, bounds, repeat(""), KINDS))
    is_between = gap.place.startswith("into ")
    return whole if whole.differs or is_between else next((one for one in of_kinds if one.differs), whole)


def _ordered(places: list[Place], calls: list[Call]) -> list[Place]:
    """The places in the order of the calls; those of one place stay in theirs."""
    order: dict[str, int] = {}
    for call in calls:
        for place in (f"into {call.name}", call.name):
            order.setdefault(place, len(order))
    return sorted(places, key=lambda place: order.get(place.name, len(order)))


def _noise(place: str, rounding: dict[str, tuple[float, ...]]) -> tuple[float, ...]:
    """The largest rounding, of each kind, of the modules that make up a place; that of the worst place if none of its name is known."""
    places = spellings(place)
    head, _, last = places[0].rpartition(".")
    if place == "logits":
        last = "lm_head"  # which engines apply without calling it
    names = [*places, last, *(f"{head}.{part}" for part in FUSED.get(last, ()))]
    known = [rounding[name] for name in names if name in rounding]
    return tuple(map(max, zip(*(known or rounding.values()))))
