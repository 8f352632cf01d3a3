"""Scenarios on the installed verl, each in a process of its own, as platforms and process groups are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cpu_lab  # noqa: E402

NEED_VERL = (
    "test_installed.py",
    "test_job.py",
    "test_probe.py",
    "test_running_cluster.py",
    "test_worker_start.py",
)


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
        if item.path.parent == Path(__file__).parent and item.path.name in NEED_VERL:
            item.add_marker(pytest.mark.verl)
            if find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))
