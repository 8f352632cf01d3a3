"""A fault in a running engine is named, wherever it acts, and healthy engines agree: `planted` has both, and prints them as a table."""

import planted
import pytest
from exact_faults import some_full
from vllm_lab import scenario

pytestmark = pytest.mark.vllm

SOON = ("rotary positions beyond 200 are one less", "one expert of 64 is another", "top-p is ignored")


@pytest.fixture(scope="module")
def runner():
    with scenario.Runner() as interpreter:
        yield interpreter


@pytest.mark.parametrize("fault", some_full(planted.FAULTS, SOON))
def test_a_planted_fault_is_named(runner, tmp_path, fault: str) -> None:
    family, place, _, *engine = planted.FAULTS[fault]
    found = runner(planted.certified, str(planted.model(tmp_path, family)), fault, **dict(*engine))
    assert found["first"] and place in found["first"], (found["first"], found["problem"])


@pytest.mark.full
@pytest.mark.parametrize("name", planted.HEALTHY)
def test_a_healthy_engine_agrees(runner, tmp_path, name: str) -> None:
    family, engine = planted.HEALTHY[name]
    found = runner(planted.certified, str(planted.model(tmp_path, family)), **engine)
    assert found["ok"], (found["first"], found["problem"], found["not_compared"])
