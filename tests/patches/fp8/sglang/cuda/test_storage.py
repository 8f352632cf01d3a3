"""SGLang's CUDA branch on the fake device: after an update, every tensor, value and address is that of a fresh load.

What this shows and what not: tests/support/fake_cuda/README.md."""

import pytest
from cuda_lab import sglang_cases
from cuda_lab.compare import compare
from cuda_lab.lane import NEEDS_DEVICE, Run, parameters

pytestmark = [pytest.mark.cuda, pytest.mark.sglang, NEEDS_DEVICE]


def of(mode: str, capability: int, **more: str) -> Run:
    names = tuple(sglang_cases.of(capability))
    return Run("sglang_storage", mode, capability, names, tuple(more.items()), is_new=True)


FRESH = {capability: of("fresh", capability) for capability in sglang_cases.CAPABILITIES}
UPDATED = {capability: of("update", capability) for capability in FRESH}
ALL = parameters(sglang_cases.of, FRESH, UPDATED)


@pytest.mark.parametrize(("capability", "name"), ALL)
def test_an_update_is_a_fresh_load(lane, capability: int, name: str) -> None:
    fresh, updated = (lane.result(run[capability])[name] for run in (FRESH, UPDATED))
    assert "error" not in fresh and "error" not in updated, (fresh.get("error"), updated.get("error"))
    assert (fresh["launches"], updated["launches"]) == (0, 0)  # a refused launch computed nothing
    found = compare(fresh, updated)
    assert not found.faults
    assert found.changed >= 10 and found.values > 300
    wanted = sglang_cases.CASES[name].method
    assert any(wanted in method for method in methods(fresh["found"]))


def methods(found: dict[str, tuple]) -> set[str]:
    """Return the class names of the quantization methods of linear layers and experts that a snapshot shows."""
    names = {what[1].rpartition(".")[2] for what in found.values() if what[0] == "type"}
    return {name for name in names if name.endswith(("LinearMethod", "MoEMethod"))}
