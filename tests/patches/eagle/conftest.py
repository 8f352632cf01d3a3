"""Helper modules beside the tests are imported by their names."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

NEED_TORCH = ("test_sample.py", "test_ring.py", "test_recorder.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.name in NEED_TORCH and find_spec("torch") is None:
        return True
    return None
