"""Measure what an update of an engine of `cuda_lab.sizes`' shapes takes: `felting.updates`, with the sizes of a card.

    python -m cuda_lab.updates fresh|update CHECKPOINTS OUT MODEL_PRECISION

`fresh` is vLLM's own reload in one call, `update` FlashPatch's in each size of bucket, under `ATOMIC`'s option."""

import os
import sys
from pathlib import Path
from typing import Any

from felting import models, updates

from cuda_lab import results
from cuda_lab.sizes import GIB, HERE


def main(mode: str, root: str, out: str, name: str) -> None:
    results.add(out, name, results.attempt(lambda: measured(Path(root), mode == "update", *name.split("_"))))
    results.leave()


def measured(root: Path, ours: bool, model: str, precision: str) -> dict[str, Any]:
    """Say by way of an update its seconds, calls of Python, launches, and the most bytes beside the model."""
    models.MODELS[model] = {"7B": HERE.dense, "30B": HERE.experts}[model]
    updates.BUCKETS = HERE.buckets
    atomic = os.environ.get("ATOMIC", "by vLLM")
    found = updates.measured(root / atomic, model, precision, ours)
    del found["sizes"]
    ways = (
        f"{way} {atomic}: {one['wall'] / 1000:.3f} s, {one['calls']} calls, {one['launches']} launches, {one['peak'] / GIB:.2f} GiB"
        for way, one in found.items()
    )
    return {"said": "; ".join(ways)}


if __name__ == "__main__":
    main(*sys.argv[1:])
