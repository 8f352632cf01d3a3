"""Compare tables that are looked up, of tokens and of learned positions, row by row: a prompt reads few of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding

from flashpatch.verify.exact.names import counterparts

DIRECTIONS = 8
"""Numbers that are kept of a row: its products with so many directions, the same for each table."""
STEP = 4096
"""Rows that are looked up at once."""
Rows = Mapping[str, torch.Tensor]
"""By module: what is kept of each of its rows, [N, DIRECTIONS], float32 on the host."""
UNREAD = "rows that no token reads"


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
    """Yield module, which of its rows differ by more than ``bound``, and the largest gap, as a part of a row's norm.

    Args:
        model: the trainer's.
        engine: rows of the engine's tables.
    """
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
