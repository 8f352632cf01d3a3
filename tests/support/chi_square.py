"""Pearson's chi-square of counts against an exact distribution."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch


def chance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """P-value of counts [cells] whose expectations [cells] are known; cells that expect less than 5 are one."""
    return _p_value(*_statistic(found, expected))


def chance_of_next(
    sequences: Iterable[list[int]],
    position: int,
    next_probabilities: Callable[[tuple[int, ...]], torch.Tensor],
    least: int,
) -> tuple[float, int]:
    """P-value of the token at ``position`` given those before it, and how many sequences it is about.

    ``next_probabilities`` gives the exact distribution [vocabulary] after a beginning. Beginnings that came ``least``
    times or more count: the statistic is the sum over them, as tokens are independent given their beginnings."""
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids in sequences:
        after[tuple(ids[:position])][ids[position]] += 1
    statistic, freedom, total = 0.0, 0, 0
    for beginning, counts in after.items():
        if counts.total() < least:
            continue
        wanted = next_probabilities(beginning).double()
        if any(wanted[token] <= 0 for token in counts):
            return 0.0, counts.total()
        found = torch.tensor([counts[token] for token in range(len(wanted))], dtype=torch.float64)
        more = _statistic(found, wanted * counts.total())
        statistic, freedom, total = statistic + more[0], freedom + more[1], total + counts.total()
    return _p_value(statistic, freedom), total


def _statistic(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom."""
    rare = expected < 5
    pools = [cells[~rare] for cells in (found, expected)]
    if expected[rare].sum() > 0:
        pools = [torch.cat([pool, cells[rare].sum()[None]]) for pool, cells in zip(pools, (found, expected))]
    return float(((pools[0] - pools[1]) ** 2 / pools[1]).sum()), len(pools[0]) - 1


def _p_value(statistic: float, freedom: int) -> float:
    if freedom < 1:
        raise ValueError("chi-square: fewer than two cells; take more samples")
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
