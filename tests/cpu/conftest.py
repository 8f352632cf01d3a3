"""Scenarios on the installed verl, each in a process of its own, as platforms and process groups are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cpu_lab  # noqa: E402

NEEDS = {"test_installed.py": "verl", "test_running_cluster.py": "verl", "test_job.py": "verl"}


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[..., str]:
    """Run Python code with ``FLASHPATCH=names``; it must succeed, and its output is returned."""

    def run(code: str, names: str = "cpu", **extra: str) -> str:
        done = cpu_lab.python(code, tmp_path, **({"FLASHPATCH": names} if names else {}), **extra)
        assert done.returncode == 0, cpu_lab.tail(done)
        return done.stdout

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = NEEDS.get(item.path.name) if item.path.parent == Path(__file__).parent else None
        if needed and find_spec(needed) is None:
            item.add_marker(pytest.mark.skip(reason=f"{needed} is not installed"))
