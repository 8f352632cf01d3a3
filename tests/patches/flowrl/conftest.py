"""Jobs on the installed verl, in processes of their own, as platforms and process groups are."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

NEED_VERL = ("test_checkpoint.py", "test_job.py", "test_parity.py", "test_probe.py", "test_stock.py")
NEED_TORCH = ("test_objective.py", "test_partition.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in NEED_VERL:
            item.add_marker(pytest.mark.verl)
            if find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.name in (*NEED_VERL, *NEED_TORCH) and find_spec("torch") is None:
        return True
    return None
