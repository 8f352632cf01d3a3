"""Plans carried out by two trainers and two rollout sides, in processes of their own."""

import os

import pytest


@pytest.fixture(scope="session")
def clean() -> dict[str, str]:
    """Variables that would help a scenario along, to be removed from its environment."""
    return {name: "" for name in os.environ if name.startswith(("FLASHPATCH", "VERL_", "RAY_"))}
