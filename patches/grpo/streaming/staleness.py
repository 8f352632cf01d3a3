"""Say how old tokens are: versions of the policy between the one that generated a token and the one that is trained.

Version ``n`` is the policy after step ``n``, and step ``n`` trains version ``n - 1``: a token that this version generated
has age 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flashpatch.patches.grpo.streaming.token_versions import KEY

_SHOWN = 4  # ages with a share of their own; older ones share the last


def ages(tag: Mapping[str, Any], extra: Mapping[str, Any] | None, step: int) -> Counter[int]:
    """Count a sample's generated tokens by age.

    Args:
        tag: verl's tag of the sample, with the version of its first token; all tokens count as that old if nothing
            more is known.
        extra: the sample's extra fields, with the version of each part under `token_versions.KEY`.
        step: number of the training step.

    Returns:
        empty if no version is known.
    """
    parts = (extra or {}).get(KEY) or [[tag.get("min_global_steps"), tag.get("response_len", 1)]]
    found: Counter[int] = Counter()
    for version, tokens in parts:
        if version is not None:
            found[max(step - 1 - version, 0)] += tokens
    return found


def histogram(samples: Iterable[Counter[int]]) -> dict[str, float]:
    """Return the share of tokens per age.

    Returns:
        ``stream/staleness/0`` to ``3``, ``stream/staleness/4_or_more``, and ``mean`` and ``max``; empty without tokens.
    """
    counted = sum(samples, Counter())
    total = counted.total()
    if not total:
        return {}
    found = {f"stream/staleness/{age}": counted[age] / total for age in range(_SHOWN)}
    found[f"stream/staleness/{_SHOWN}_or_more"] = 1 - sum(found.values())
    return {
        **found,
        "stream/staleness/mean": sum(age * tokens for age, tokens in counted.items()) / total,
        "stream/staleness/max": float(max(counted)),
    }
