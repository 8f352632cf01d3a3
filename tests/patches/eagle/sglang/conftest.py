"""Speculation on real SGLang engines."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.sglang)
            if find_spec("sglang") is None:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are kept for the session."""
    return tmp_path_factory.mktemp("eagles")
