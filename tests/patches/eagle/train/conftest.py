import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HERE = Path(__file__).parent
PLAIN = ("test_judge.py", "test_coordinator.py")

if find_spec("torch") is None or find_spec("transformers") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name not in PLAIN]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a tiny target whose next state depends on the token alone, with states of norm one."""
    import drafter_lab

    yield drafter_lab.save_target(tmp_path_factory.mktemp("target"))
