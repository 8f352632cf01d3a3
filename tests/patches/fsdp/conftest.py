"""Plans carried out by two trainers and two rollout sides, in processes of their own."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

NEED_VERL = (
    "test_audit.py",
    "test_installed.py",
    "test_sync_job.py",
    "test_fsdp_probe.py",
    "test_refusals.py",
)
NEED_TORCH = ("test_fingerprint.py", "test_shards.py", "test_wire.py")


@pytest.fixture(scope="session")
def clean() -> dict[str, str]:
    """Variables that would help a scenario along, to be removed from its environment."""
    return {name: "" for name in os.environ if name.startswith(("FLASHPATCH", "VERL_", "RAY_"))}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent != here:
            continue
        if item.path.name in NEED_VERL:
            item.add_marker(pytest.mark.verl)
            if find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))
        if item.path.name in NEED_TORCH and find_spec("torch") is None:
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
