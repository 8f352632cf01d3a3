"""Measure a row in this process, and append what was found, or its error, to OUT.

    python -m card fresh|update FOLDER OUT PART:ROW

`update` runs with FLASHPATCH set, `fresh` without. A part is a module of this package."""

import importlib
import sys
from pathlib import Path

from cuda_lab import results


def main(mode: str, root: str, out: str, case: str) -> None:
    part, _, row = case.partition(":")
    module = "cuda_lab.sglang_card" if part == "sglang" else f"card.{part}"  # a lab without vLLM
    found = results.attempt(
        lambda: importlib.import_module(module).measured(row, Path(root), mode == "update")
    )
    results.add(out, case, found)
    results.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
