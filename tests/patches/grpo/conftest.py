"""Tests of the grpo family; those that need torch or verl are marked, and skipped without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import grpo_lab  # noqa: E402

NEED_VERL = ("test_verl_loss.py", "test_verl_router.py", "test_installed.py", "test_job.py", "test_probe.py")


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
        done = grpo_lab.python(code, tmp_path, **({"FLASHPATCH": names} if names else {}), **extra)
        assert done.returncode == 0, grpo_lab.tail(done)
        return done.stdout

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in NEED_VERL:
            item.add_marker(pytest.mark.verl)
            if find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))
