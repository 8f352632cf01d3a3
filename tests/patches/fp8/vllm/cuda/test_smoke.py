"""Two storage cases in interpreters that start with FlashPatch, as a user's do: what `make test` runs of this lane.

What this shows and what not: tests/support/fake_cuda/README.md."""

import pytest
from cuda_lab import cases
from cuda_lab.compare import compare
from cuda_lab.lane import NEEDS_DEVICE, Run

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]

FRESH, UPDATED = (Run("storage", mode, 90, cases.SMOKE, is_new=True) for mode in ("fresh", "update"))


@pytest.mark.runs(FRESH, UPDATED)
@pytest.mark.parametrize("name", cases.SMOKE)
def test_an_update_in_an_interpreter_of_its_own_is_a_fresh_load(lane, name: str) -> None:
    fresh, updated = lane.result(FRESH)[name], lane.result(UPDATED)[name]
    assert "error" not in fresh and "error" not in updated, (fresh.get("error"), updated.get("error"))
    found = compare(fresh, updated)
    assert not found.faults and found.changed >= cases.CASES[name].changed
    assert (fresh["launches"], updated["launches"]) == (0, 0)
