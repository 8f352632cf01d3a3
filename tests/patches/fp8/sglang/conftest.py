"""Real SGLang engines, without an accelerator."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are kept for the session."""
    return tmp_path_factory.mktemp("models")
