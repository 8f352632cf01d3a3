"""Tests of the grpo family; those that need torch or verl are marked, and skipped without it."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import grpo_lab
import pytest


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    )
    return True


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """Run Python code on several gloo ranks, each a process; ``rank`` and ``world`` are defined in it."""

    def run(code: str, world: int = 2, **extra: str) -> list[str]:
        return grpo_lab.ranks(code, tmp_path, world, **extra)

    return run
