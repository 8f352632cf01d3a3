"""Tests of the grpo family; those that need torch or verl are marked, and skipped without it."""

from collections.abc import Callable
from pathlib import Path

import cpu_lab
import grpo_lab
import pytest


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """Run Python code on several gloo ranks, each a process; ``rank`` and ``world`` are defined in it."""

    def run(code: str, world: int = 2, **extra: str) -> list[str]:
        return grpo_lab.ranks(code, tmp_path, world, **extra)

    return run


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[..., str]:
    """Run Python code with ``FLASHPATCH=names``; it must succeed, and its output is returned."""

    def run(code: str, names: str = "grpo", **extra: str) -> str:
        return cpu_lab.checked(code, tmp_path, **({"FLASHPATCH": names} if names else {}), **extra).stdout

    return run
