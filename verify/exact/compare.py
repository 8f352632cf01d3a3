"""Compare an engine with the model that a trainer trains: distributions at every position, then module by module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.exact import forced
from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.certificate import DISTRIBUTIONS, Certificate, Place
from flashpatch.verify.exact.engine import Pass
from flashpatch.verify.exact.forced import (
    COLUMN,
    WHOLE,
    Gap,
    Part,
    counterparts,
    forward,
    gaps,
    pairs,
    router_logits,
    spellings,
)
from flashpatch.verify.exact.routers import choosing
from flashpatch.verify.exact.rows import UNREAD
from flashpatch.verify.exact.rows import gaps as of_rows
from flashpatch.verify.exact.shards import some

_NUMBER = re.compile(r"\.\d+(?=\.)")  # of a layer
FACTOR = 4.0
FLOOR = 2.0**-8
"""A place differs if its gap is more than `FACTOR` times what rounding alone gives there, and more than `FLOOR`, bf16's spacing.

A KL grows with the square of a gap, and so do its factor and its floor."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of a model that end what a token attends to."""
FP8_LARGEST = 448.0


def compare(load: Callable[[torch.dtype], torch.nn.Module], ids: list[int], engine: Pass) -> Certificate:
    """Compare one prefill of an engine, of the tokens ``ids``, and its `Pass.also` with the trainer's model.

    ``load`` returns the Hugging Face model in a dtype, on any device, in evaluation mode."""
    if engine.problem or not engine.logits.numel():
        problem = engine.problem or "the engine gave no logits of the prompt"
        return Certificate([], problem=f"cannot compare here: {problem}")
    passes = [(ids, engine), *((one.ids, one) for one in engine.also)]
    small = as_served(load(torch.bfloat16), engine)
    near = [_rounding(small, tokens, one) for tokens, one in passes]
    del small  # one model in memory at a time
    exact = load(torch.float32)
    wanted = logits(exact, ids)
    kl, kl_rounding = mean_kl(wanted, engine.logits), mean_kl(wanted, near[0][1])
    bound = max(FACTOR**2 * kl_rounding, FLOOR**2)
    bound += _by_choice(exact, ids, engine.calls, wanted) if kl > bound else 0.0
    tables = [Place(name, gap, FLOOR, "", which) for name, which, gap in of_rows(exact, engine.rows, FLOOR)]
    is_compiled = len(engine.calls) == 1  # the head's
    found = [_gaps(exact, *one, of_near) for one, of_near in zip(passes, near)] if not is_compiled else []
    experts = [gap for own, _ in found for gap in own if gap.count]
    left = tuple(_unreached(exact, len(ids), engine, experts, {table.name for table in tables}))
    alike: list[Gap] = []
    # A merged model does not say which bits its base has.
    if engine.quantization and found and not engine.adapter:
        alike = gaps(as_served(exact, engine), ids, engine.calls, engine.logits, engine.part)
    places: list[Place] = []
    beside: list[Place] = []
    for (_, one), (own, rounding) in zip(passes, found):
        into = beside if one.part.beside else places
        into += _places(one, own, rounding, alike if one is engine else (), places)
        if len(own) < 2:
            return Certificate([], problem="cannot compare: no module of both models has the same name")
    beside.sort(key=lambda place: (place.differs, place.gap / place.bound))  # of one name the worst
    places += {place.name: place for place in beside}.values()
    blind = [place.name for place in places if place.bound >= 1]
    if blind and not engine.quantization:
        problem = f"the trainer's own model in bf16 and in float32 have nothing in common at {blind[0]}"
        return Certificate(places, problem=f"cannot compare here: {problem}")
    # Ranks that disagree come first, as what follows is compared with the first rank's.
    places = _ordered([*engine.apart, *places, *tables], engine.calls)
    # The last place: a difference that no module has that is compared.
    places.append(Place(DISTRIBUTIONS, kl, bound))
    return Certificate(places, kl, kl_rounding, quantization=engine.quantization, not_compared=left)


def _rounding(small: torch.nn.Module, ids: list[int], one: Pass) -> tuple[list[Call], torch.Tensor]:
    """The calls and logits of the model in bf16, rounded as the engine is, with the experts of the engine where it gave each a turn."""
    routers = router_logits(small, len(ids), one.calls) if one.part.turns else {}
    with choosing(small, routers, later=False), recorded(small) as calls:
        return calls, logits(small, ids, one.part)


def _gaps(
    exact: torch.nn.Module, ids: list[int], one: Pass, near: tuple[list[Call], torch.Tensor]
) -> tuple[list[Gap], dict[str, Gap]]:
    """The gaps of a pass, and those of rounding by place."""
    same = pairs(exact, len(ids), one.calls)[0]  # the same modules, so that the same lies between them
    calls = [call for call in near[0] if call.name in same]
    rounding = gaps(exact, ids, calls, near[1][len(near[1]) - len(one.logits) :], one.part)
    return gaps(exact, ids, one.calls, one.logits, one.part), {gap.place: gap for gap in rounding}


def _places(
    one: Pass, found: list[Gap], rounding: Mapping[str, Gap], alike: Collection[Gap], before: list[Place]
) -> list[Place]:
    """The places of a pass but those that ``before`` shows to differ; ``alike`` are its gaps to the trainer's model rounded as it is."""
    # Which each rank rounds before they are added.
    parts = {call.name for call in one.calls if call.given_by is not None}
    known, same = {place.name for place in before if place.differs}, {gap.place: gap for gap in alike}
    places = [_place(gap, rounding, gap.place in parts, same.get(gap.place)) for gap in found]
    where = [f"at positions up to {one.part.stride * (len(one.ids) - 1)}"] * (one.part.stride > 1)
    where += ["beside others"] * one.part.beside
    return [
        replace(place, kind=", ".join(filter(None, [place.kind, *where])))
        for place in places
        if place.name not in known
    ]


def _unreached(
    model: torch.nn.Module, length: int, engine: Pass, experts: list[Gap], tables: Collection[str]
) -> Iterator[str]:
    """Name what no comparison reached."""
    known, called = dict(model.named_modules()), {call.name for call in engine.calls}
    if len(engine.calls) == 1:
        yield "its modules, which a compiled engine does not show, and its decode steps"
        return
    names = [_NUMBER.sub(".*", name) for name in engine.left if counterparts(name, known, called)]
    yield from (f"{name}, which cannot be joined from its ranks" for name in dict.fromkeys(names))
    for gap in experts:
        if missing := [str(one) for one in range(gap.count) if one not in gap.experts]:
            yield f"{gap.place}'s experts {', '.join(missing)}, which no token took"
    reached = {name for gap in experts for name in spellings(gap.place)}
    blocks = [name.removesuffix(".experts") for name in known if name.endswith(".experts")]
    yield from (
        f"{name}'s experts one by one"
        for name in dict.fromkeys(_NUMBER.sub(".*", one) for one in blocks if one not in reached)
    )
    if not engine.part.steps:
        yield "decode steps"
    if not any(one.part.beside for one in engine.also):
        yield "steps of several sequences"
    if not any(one.part.stride > 1 for one in engine.also) and any("rotary_emb" in name for name in known):
        yield "rotary positions beyond the prompt, of which the engine has no table like the trainer's"
    compared = {name for table in tables for name in counterparts(table, known, tables)}
    for name, module in known.items():
        if isinstance(module, torch.nn.Embedding) and name not in compared:
            yield f"{name}'s {UNREAD}"
    for setting in WINDOWS:
        window = getattr(model.config.get_text_config(), setting, None) or 0
        if window >= length:
            yield f"the window of {window} tokens ({setting}), which the prompt's {length} do not fill"


def _by_choice(model: torch.nn.Module, ids: list[int], calls: list[Call], wanted: torch.Tensor) -> float:
    """The KL that comes with the experts that the engine's routers chose, whichever it took of those with equal logits."""
    routers = router_logits(model, len(ids), calls)
    found = 0.0
    for later in (False, True) if routers else ():
        with choosing(model, routers, later):
            found += mean_kl(wanted, logits(model, ids))
    return found


def _place(gap: Gap, rounding: Mapping[str, Gap], by_parts: bool, alike: Gap | None) -> Place:
    """A place; ``alike`` is its gap to the trainer's model rounded as the engine is."""
    noise = _noise(gap.place, rounding)
    least = [max(FLOOR, noise[0] / FACTOR * (kind not in ("", forced.STEPPED))) for kind in forced.KINDS]
    # Of tokens that are all the same one rounding is a column's offset, and may be what another draw of it is not.
    widest = [
        FACTOR * (max(noise[0], size) if forced.OFFSET in kind else size)
        for kind, size in zip(forced.KINDS, noise)
    ]
    bounds = list(map(max, widest, least))
    whole, *_ = of_kinds = _of_kinds(gap, bounds)
    if whole.differs and not gap.experts:
        return whole
    # An engine nearer to that model than rounding leaves two rounds as it does: what is left is less than rounding.
    if alike and alike.size < gap.size / 2:
        of_kinds += _of_kinds(alike, map(max, noise, least))
    if gap.place.startswith("into "):
        of_kinds = [one for one in of_kinds if one.kind in ("", forced.STEPPED)]
    if by_parts:
        of_kinds = [one for one in of_kinds if COLUMN not in one.kind]
    near = next((rounding[name].experts for name in spellings(gap.place) if name in rounding), {})
    most = [max(FACTOR * max(sizes), FLOOR) for sizes in zip(*near.values())] or [FLOOR] * len(forced.KINDS)
    of_experts = [
        Place(gap.place, size, bound, "", f"expert {expert}")
        for expert, sizes in gap.experts.items()
        for size, bound in zip(sizes, most)
    ]
    of_experts.sort(key=lambda one: -one.gap / one.bound)
    return next((one for one in (*of_experts[:1], *of_kinds) if one.differs), whole)


def _of_kinds(gap: Gap, bounds: Iterable[float]) -> list[Place]:
    """A place per kind of gap, with the ranks in whose columns it is more than its bound."""
    found = []
    for at, (size, bound, kind) in enumerate(zip(gap.sizes, bounds, forced.KINDS)):
        differing = [rank for rank, sizes in enumerate(gap.ranks) if not sizes[at] <= bound]
        found.append(Place(gap.place, size, bound, some(differing, len(gap.ranks)), kind))
    return found


def _ordered(places: list[Place], calls: list[Call]) -> list[Place]:
    """The places in the order of the calls; those of one place stay in theirs."""
    order: dict[str, int] = {}
    for call in calls:
        for place in (f"into {call.name}", call.name):
            order.setdefault(place, len(order))
    return sorted(places, key=lambda place: order.get(place.name, len(order)))


def _noise(place: str, rounding: Mapping[str, Gap]) -> tuple[float, ...]:
    """The largest rounding, of each kind, of the modules that make up a place; that of the worst place if none of its name is known."""
    places = spellings(place)
    head, _, last = places[0].rpartition(".")
    if place == "logits":
        last = "lm_head"  # which engines apply without calling it
    names = [*places, last, *(f"{head}.{part}" for part in forced.FUSED.get(last, ()))]
    known = [rounding[name] for name in names if name in rounding]
    return tuple(map(max, zip(*(gap.sizes for gap in known or rounding.values()))))


def as_served(model: torch.nn.Module, engine: Pass) -> torch.nn.Module:
    """Let the linear layers of a model compute as an engine's do, for good, and return it.

    Where the engine's are in eight bits they have weights and inputs rounded to these, all but the head, and experts their weights. Of
    those with an adapter merged in, its product is taken out again, and added to what the base returns."""
    is_int = any(word in engine.quantization for word in ("int8", "w8a8", "compressed"))
    parts = adapted(engine.adapter) if engine.adapter else {}
    for name, module in model.named_modules():
        rounds = engine.quantization and name.endswith("experts")
        for own in module.parameters(recurse=False) if rounds else ():
            own.data = to_eight_bits(own.data, is_int) if own.dim() == 3 else own.data
        if not isinstance(module, torch.nn.Linear):
            continue
        a, b = parts.get(name, (None, None))
        if a is not None:
            module.weight.data = (module.weight.data - b @ a).to(module.weight)
        if engine.quantization and not name.endswith("lm_head"):
            module.weight.data = to_eight_bits(module.weight.data, is_int)
            module.forward = partial(_narrowed, module.forward, is_int)
        if a is not None:
            module.forward = partial(_beside, module.forward, a, b)
    return model


def _narrowed(forward: Callable[..., torch.Tensor], is_int: bool, given: torch.Tensor) -> torch.Tensor:
    return forward(to_eight_bits(given, is_int))


def _beside(
    forward: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, given: torch.Tensor
) -> Any:
    """What a layer returns and the product of its adapter, as engines round it: A's in float32, B's and the sum to the model's dtype."""
    return forward(given) + (given.float() @ a.T).to(given) @ b.T.to(given)


def adapted(folder: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by the name of a linear layer A and B, scaled, of an adapter in PEFT's format, float32."""
    from safetensors.torch import load_file

    config = json.loads(Path(folder, "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    names = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): name for name in tensors}
    found = {}
    for name, a in names.items():
        if a.endswith(".lora_A.weight"):
            b = a.replace(".lora_A.", ".lora_B.")
            found[name] = tensors[a].float(), tensors[b].float() * scale
    return found


def to_eight_bits(values: torch.Tensor, is_int: bool) -> torch.Tensor:
    """Return the values rounded to int8 or e4m3, with a scale per row."""
    wide, top = values.float(), 127 if is_int else FP8_LARGEST
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    scaled = wide * top / largest
    narrow = scaled.round() if is_int else scaled.to(torch.float8_e4m3fn).float()
    return (narrow * largest / top).to(values.dtype)


def logits(model: torch.nn.Module, ids: list[int], part: Part = WHOLE) -> torch.Tensor:
    """Return the model's logits at each position but the last, [T - 1, V], float32 on the host."""
    return forward(model, ids, part).float().cpu()


def mean_kl(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the mean over positions of KL(wanted || got), nats, of logits [T, V]; an engine's are wider where it pads its
    vocabulary."""
    a, b = wanted.log_softmax(-1), got[:, : wanted.shape[1]].log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).mean().item()


def kept_kl(wanted: torch.Tensor, got: torch.Tensor, top_p: float, top_k: int) -> float:
    """Return the mean KL(kept || wanted), nats, of what truncated sampling keeps of ``got`` and renormalizes; see `mean_kl`.

    ``top_p`` and ``top_k`` are as vLLM and SGLang take them, 1 and -1 cut nothing."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    kept = got[:, : wanted.shape[1]]
    kept = TopKLogitsWarper(top_k)(None, kept) if top_k > 0 else kept
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    a, b = kept.log_softmax(-1), wanted.log_softmax(-1)
    return (a.exp() * (a - b)).masked_fill(kept.isinf(), 0.0).sum(-1).mean().item()
