"""Measure what an update takes of an engine: vLLM's own reload in one call, FlashPatch's in each size of bucket."""

import os
from pathlib import Path

from felting import models, updates

from card.table import BUCKETS, GIB, MODELS


def measured(row: str, root: Path, ours: bool) -> dict[str, dict[str, float]]:
    """Return by way of an update its seconds, calls of Python, launches, and the most memory beside the model."""
    model, precision = row.split("_")
    models.MODELS[model], updates.BUCKETS = MODELS[model], BUCKETS
    atomic = os.environ.get("ATOMIC", "")
    found = updates.measured(root / f"{model}{atomic}", model, precision, ours)
    del found["sizes"]
    return {
        f"{way} {atomic}".strip(): {
            "s": one["wall"] / 1000,
            "calls": one["calls"],
            "launches": one["launches"],
            "GiB": one["peak"] / GIB,
        }
        for way, one in found.items()
    }
