"""Interpreters and checkpoints that the files here share."""

from collections.abc import Iterator

import pytest
import vllm_updates as updates
from vllm_lab import environment, scenario


@pytest.fixture(scope="module")  # what one file leaves running would be lost in another's forks
def runner() -> Iterator[scenario.Runner]:
    """Run functions in an interpreter where each chooses the precision itself."""
    ledger = {"FLASHPATCH_LEDGER": str(environment.store() / "ledger")}
    with scenario.Runner(ledger) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def bf16() -> Iterator[scenario.Runner]:
    """Run functions in an interpreter that was started with FLASHPATCH=bf16."""
    with scenario.Runner({"FLASHPATCH": "bf16"}) as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def ab() -> tuple[str, str]:
    """Return two checkpoints of one model."""
    return updates.checkpoint("qwen2", 0), updates.checkpoint("qwen2", 1)
