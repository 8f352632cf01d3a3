"""What the tests of all rooms share."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)
