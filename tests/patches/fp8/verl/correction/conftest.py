"""Some of it needs the installed verl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == Path(__file__).with_name("test_under_verl.py"):
            item.add_marker(pytest.mark.verl)
            if find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))
