"""Tiny models from the room next door; torch gets one thread, as they are tiny."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("torch", "transformers", "safetensors"))):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
