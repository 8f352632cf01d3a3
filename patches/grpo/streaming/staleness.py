"""Count how many versions of the policy lie between the one that generated a sample and the one it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 4  # versions with a share of their own; older ones share the last


def histogram(tags: Iterable[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Return the share of samples per age, in versions of the policy.

    Version ``n`` is the policy after step ``n``; step ``n`` trains version ``n - 1``, so its samples have age 0 when
    version ``n - 1`` generated them. A sample's age is that of its oldest token.

    Args:
        tags: verl's tags of the samples; ``min_global_steps`` is the version of the first token.
        step: number of the training step.

    Returns:
        ``stream/staleness/0`` to ``3``, ``stream/staleness/4_or_more``, and ``mean`` and ``max``.
    """
    ages = [
        max(step - 1 - tag["min_global_steps"], 0) for tag in tags if tag.get("min_global_steps") is not None
    ]
    if not ages:
        return {}
    counted = Counter(min(age, _SHOWN) for age in ages)
    found = {f"stream/staleness/{age}": counted[age] / len(ages) for age in range(_SHOWN)}
    found[f"stream/staleness/{_SHOWN}_or_more"] = counted[_SHOWN] / len(ages)
    return {
        **found,
        "stream/staleness/mean": sum(ages) / len(ages),
        "stream/staleness/max": float(max(ages)),
    }
