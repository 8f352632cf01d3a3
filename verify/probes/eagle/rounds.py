"""Prompts for the probe's engines, and the entry point of their jobs, which run in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST = 3  # draft tokens per step
TOKENS = 80  # generated per prompt


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def main(run: Callable[[Path, dict[str, Any]], None]) -> None:
    """Call ``run``, which fills a dictionary of observations, and write that to ``seen.json`` in the directory
    ``sys.argv[1]``."""
    workdir = Path(sys.argv[1])
    seen: dict[str, Any] = {"tokens": {}, "seconds": {}}
    try:
        run(workdir, seen)
        time.sleep(2.5)  # rows of the ledger are written once a second
    except Exception as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / "seen.json").write_text(json.dumps(seen))
    os._exit(0)  # an engine's shutdown takes seconds
