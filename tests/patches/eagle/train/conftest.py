from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a tiny target whose next state depends on the token alone, with states of norm one."""
    import drafter_lab

    yield drafter_lab.save_target(tmp_path_factory.mktemp("target"))
