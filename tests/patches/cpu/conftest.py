"""Scenarios on the installed verl, each in a process of its own, as platforms and process groups are."""

from collections.abc import Callable
from pathlib import Path

import cpu_lab
import pytest


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[..., str]:
    """Run Python code with ``FLASHPATCH=names``; it must succeed, and its output is returned."""

    def run(code: str, names: str = "cpu", **extra: str) -> str:
        return cpu_lab.checked(code, tmp_path, **({"FLASHPATCH": names} if names else {}), **extra).stdout

    return run
