"""Compare what a prompt does not read: rows of tables that are looked up, of tokens and of learned positions; and let an engine take its
tokens for ones that are far apart, where a scaling of positions for long texts shows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding

from flashpatch.verify.exact.calls import hooked
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


def farthest(model: torch.nn.Module) -> int:
    """Return the last position for which all of an engine's tables have cosines; 0 if it has none."""
    tables = [getattr(module, "cos_sin_cache", None) for module in model.modules()]
    return min((min(len(one), FARTHEST) for one in tables if isinstance(one, torch.Tensor)), default=1) - 1


@contextmanager
def spread(model: torch.nn.Module, stride: int, count: int) -> Iterator[None]:
    """Within, an engine's model takes each of ``count`` tokens for one that is ``stride`` times as far."""
    made: list[torch.Tensor | None] = [None]

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        old = given.arguments["positions"]
        if isinstance(old, torch.Tensor) and old.numel() and old is not made[0] and old.max() < count:
            made[0] = given.arguments["positions"] = old * stride  # modules below get these
        return given.args, given.kwargs

    takers = [one for one in model.modules() if "positions" in inspect.signature(one.forward).parameters]
    with hooked([one.register_forward_pre_hook(before, with_kwargs=True) for one in takers]):
        yield
