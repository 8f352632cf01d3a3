"""What ``flashpatch-verify grpo`` says here, and what its two ranks saw: run once for the tests that look at either."""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_lab
import verify_command


@dataclass(frozen=True)
class Said(verify_command.Said):
    """What the command said, and what each rank saw."""

    seen: list[dict[str, Any]]


@functools.cache
def said() -> Said:
    """Run the command in this process; its ranks fork from a warm interpreter."""
    with tempfile.TemporaryDirectory() as name:
        found, workdir = verify_command.here("grpo", Path(name), grpo_lab.environment(Path(name)))
        ranks = sorted(workdir.glob("rank-*.json"))
        return Said(**vars(found), seen=[json.loads(file.read_text()) for file in ranks])
