"""Compare what a prompt does not read: rows of tables that are looked up, of tokens and of learned positions, and by what queries and
keys are turned further on, where a scaling of positions for long texts shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding

from flashpatch.verify.exact.calls import recorded
from flashpatch.verify.exact.forced import counterparts

DIRECTIONS = 8
"""Numbers that are kept of a row: its products with so many directions, the same for each table."""
STEP = 4096
"""Rows that are looked up at once."""
Rows = Mapping[str, torch.Tensor]
"""By module: what is kept of each of its rows, [N, DIRECTIONS], float32 on the host."""
UNREAD = "rows that no token reads"
FARTHEST = 1 << 15
"""Beyond it an angle in float32 depends on how it is computed."""
Turns = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By module: positions, [P], and the cosines there, [P, C], float32 on the host."""


def of_model(model: torch.nn.Module) -> Rows:
    """Return what is kept of the rows of an engine's tables; each rank of tensor parallelism has to ask for them."""
    found = {}
    for name, wrapped in model.named_modules():
        module: Any = getattr(wrapped, "base_layer", wrapped)  # an adapter's layer
        if isinstance(module, torch.nn.Embedding):
            found[name] = kept(module)
        elif type(module).__name__ == "VocabParallelEmbedding":
            found[name] = _kept(module, module.org_vocab_size, next(module.parameters()).device)
    return found


def kept(module: torch.nn.Embedding) -> torch.Tensor:
    """Return what is kept of a table's rows, as they are before a module scales them."""
    weight = module.weight.detach()
    return _kept(partial(embedding, weight=weight), len(weight), weight.device)


def _kept(look_up: Any, count: int, device: torch.device) -> torch.Tensor:
    random, parts = torch.Generator().manual_seed(0), []
    directions = torch.empty(0)
    with torch.no_grad():
        for begin in range(0, count, STEP):
            rows = look_up(torch.arange(begin, min(begin + STEP, count), device=device)).double()
            if not directions.numel():
                shape = rows.shape[-1], DIRECTIONS
                directions = torch.randn(shape, generator=random, dtype=torch.float64).to(device)
            parts.append((rows @ directions / DIRECTIONS**0.5).float().cpu())
    return torch.cat(parts)


def gaps(model: torch.nn.Module, engine: Rows, bound: float) -> Iterator[tuple[str, str, float]]:
    """Yield module, which rows differ by more than ``bound``, and the largest gap, as a part of a row's norm, to the trainer's."""
    known = {name for name, _ in model.named_modules()}
    for name, rows in engine.items():
        names = counterparts(name, known, engine)
        module = model.get_submodule(names[0]) if names else None
        if not isinstance(module, torch.nn.Embedding):
            continue
        count = min(len(rows), module.num_embeddings)
        norms = module.weight.detach()[:count].float().norm(dim=1).cpu()
        sizes = (rows - kept(module)[:count])[:count].norm(dim=1) / norms.clamp(min=norms.mean() / 100)
        differing = (~(sizes <= bound)).nonzero().flatten().tolist()
        which = {0: "all rows", 1: f"row {differing[0]}" if differing else ""}
        several = f"{len(differing)} of {count} rows, the first {differing[0]}" if differing else ""
        yield name, which.get(len(differing), several), sizes.max().item()


def changed(before: Rows, after: Rows) -> str:
    """Return the first table of which a sync changed a bit; "" if there is none."""
    names = (name for name, rows in before.items() if not torch.equal(rows, after[name]))
    return next((f"{name}, {UNREAD}" for name in names), "")


def turns_of(model: torch.nn.Module) -> Turns:
    """Return what an engine's modules turn by; one of those that are the same."""
    found = {}
    for name, module in model.named_modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, torch.Tensor) and len(table) > 1:
            last = min(len(table), FARTHEST) - 1
            # In float32 whatever torch's default is: vLLM leaves the model's where an engine does not open.
            at = torch.logspace(0, 1, 16, base=last, dtype=torch.float32).long().to(table.device)
            found[name] = at.cpu(), table[at].chunk(2, -1)[0].float().cpu()
    return found


def turned(model: torch.nn.Module, engine: Turns) -> Iterator[tuple[str, int, float]]:
    """Yield module, last position and gap, as a part of the norm, to what comes nearest in the trainer's ``model``."""
    for name, (at, theirs) in engine.items():
        row = at.to(next(model.parameters()).device)[None]
        with (
            recorded(model) as calls,
            torch.no_grad(),
            suppress(Exception),
        ):  # of code that takes no positions
            model(input_ids=torch.zeros_like(row), position_ids=row, use_cache=False)
        found = [call.returned.real for call in calls if "rotary_emb" in call.name]
        # In any order, and some models have each twice.
        width, wanted = theirs.shape[-1], theirs.sort(-1).values
        every = [one.sort(-1).values[..., :: max(one.shape[-1] // width, 1)] for one in found if one.dim()]
        sizes = [(one - wanted).norm() / one.norm() for one in every if one.shape == wanted.shape]
        if sizes:
            yield name, int(at[-1]), min(sizes).item()
