"""Compute the advantages of two groups by verl's driver, and by the options' meaning in plain numbers."""

from __future__ import annotations

import math
from typing import Any

GROUPS = ("b", "a", "b", "a", "a", "b")  # of each response
REWARDS = (1.0, 0.0, 0.0, 0.5, 1.0, 0.0)
LENGTHS = (1, 2, 3, 3, 2, 1)  # tokens
OLD, REF = (
    tuple(tuple(-first - 0.1 * row - 0.05 * at for at in range(length)) for row, length in enumerate(LENGTHS))
    for first in (1.0, 1.2)
)
"""Log-probabilities of their tokens."""


def seen() -> list[float]:
    """Return what verl's driver computes: each response's advantage, the same at all of its tokens."""
    import numpy
    import torch
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer

    def padded(rows: Any) -> torch.Tensor:
        return torch.tensor([[*row, *[0.0] * (max(LENGTHS) - len(row))] for row in rows])

    tensors = {
        "old_log_probs": padded(OLD),
        "ref_log_prob": padded(REF),
        "response_mask": padded([[1.0] * length for length in LENGTHS]).long(),
        "token_level_rewards": padded([[0.0] * (n - 1) + [r] for n, r in zip(LENGTHS, REWARDS, strict=True)]),
    }
    data = DataProto.from_dict(tensors, {"uid": numpy.array(GROUPS, dtype=object)})
    found = ray_trainer.compute_advantage(data, "grpo").batch["advantages"]
    rows = [row[:length].tolist() for row, length in zip(found, LENGTHS, strict=True)]
    if any(max(row) - min(row) > 1e-6 for row in rows):
        raise SystemExit(f"advantages differ within a response: {rows}")
    return [row[0] for row in rows]


def paper(chosen: Any) -> list[float]:
    """Return what ``reward`` and ``log_z`` of the family's options say the advantages are."""
    from flashpatch.verify.probes.flowrl.paper import group_log_z

    groups = [[at for at, group in enumerate(GROUPS) if group == name] for name in sorted(set(GROUPS))]
    found = list(REWARDS)
    for mine in groups if chosen.reward == "advantage" else ():
        mean = math.fsum(REWARDS[at] for at in mine) / len(mine)
        deviation = math.sqrt(math.fsum((REWARDS[at] - mean) ** 2 for at in mine) / (len(mine) - 1))
        for at in mine:
            found[at] = (REWARDS[at] - mean) / (deviation + 1e-6)
    for mine in groups if chosen.log_z == "group" else ():
        shares = [LENGTHS[at] if chosen.length == "mean" else 1 for at in mine]
        away = [math.fsum(REF[at]) - math.fsum(OLD[at]) for at in mine]
        alone = [chosen.beta * found[at] + a / n for at, a, n in zip(mine, away, shares, strict=True)]
        log_z = group_log_z(alone, shares)
        for at in mine:
            found[at] -= log_z / chosen.beta
    return found
