"""Every way of post-processing, and both options of ``atomic``."""

import pytest


@pytest.fixture(
    params=["bare", "transposed", "quantized", "closure", "default", "partial", "cached", "handled"]
)
def method(request) -> str:
    return request.param


@pytest.fixture(params=["layer", "model"])
def atomic(request) -> str:
    return request.param
