"""Compare by what an engine and the trainer's model turn queries and keys at positions that no prompt reaches.

A scaling of positions for long texts changes next to nothing at the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch

from flashpatch.verify.exact.calls import recorded

FARTHEST = 1 << 15
"""Beyond it an angle in float32 depends on how it is computed."""
Turns = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By module: positions, [P], and the cosines there, [P, C], float32 on the host."""


def of_engine(model: torch.nn.Module) -> Turns:
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


def gaps(model: torch.nn.Module, engine: Turns) -> Iterator[tuple[str, int, float]]:
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
        every = [
            one.sort(-1).values[..., :: max(one.shape[-1] // theirs.shape[-1], 1)]
            for one in found
            if one.dim()
        ]
        alike = [one for one in every if one.shape == theirs.shape]
        if alike:
            sizes = [((one - theirs.sort(-1).values).norm() / one.norm()).item() for one in alike]
            yield name, int(at[-1]), min(sizes)
