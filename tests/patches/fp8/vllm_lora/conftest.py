"""Share the interpreter of the tests of updates."""

from collections.abc import Iterator

import pytest
from vllm_lab import environment, scenario


@pytest.fixture(scope="session")
def runner() -> Iterator[scenario.Runner]:
    """Run functions in an interpreter where each chooses the precision itself."""
    ledger = {"FLASHPATCH_LEDGER": str(environment.store() / "ledger")}
    with scenario.Runner(ledger) as interpreter:
        yield interpreter
