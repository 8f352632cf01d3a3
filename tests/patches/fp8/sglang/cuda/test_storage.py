"""SGLang's CUDA branch on the fake device: after an update, every tensor, value and address is that of a fresh load.

What this shows and what not: tests/support/fake_cuda/README.md."""

import pytest
from cuda_lab import sglang_cases, table
from cuda_lab.compare import compare
from cuda_lab.lane import NEEDS_DEVICE, Run, parameters

pytestmark = [pytest.mark.cuda, pytest.mark.sglang, NEEDS_DEVICE]


def of(mode: str, capability: int, **more: str) -> Run:
    names = tuple(sglang_cases.of(capability))
    return Run("sglang_storage", mode, capability, names, tuple(more.items()), is_new=True)


FRESH = {capability: of("fresh", capability) for capability in sglang_cases.CAPABILITIES}
UPDATED = {capability: of("update", capability) for capability in FRESH}
STOCK = {capability: of("update", capability, FLASHPATCH="0") for capability in FRESH}
ALL = parameters(sglang_cases.of, FRESH, UPDATED, STOCK)


@pytest.mark.parametrize(("capability", "name"), ALL)
def test_an_update_is_a_fresh_load(lane, capability: int, name: str) -> None:
    fresh, updated, stock = (lane.result(run[capability])[name] for run in (FRESH, UPDATED, STOCK))
    assert "error" not in fresh and "error" not in updated, (fresh.get("error"), updated.get("error"))
    assert (fresh["launches"], updated["launches"]) == (0, 0)  # a refused launch computed nothing
    found = compare(fresh, updated)
    error = stock.get("error", "")
    of_stock = error.partition(":")[0] if error else ", ".join(compare(fresh, stock).faults) or "equal"
    verdict = ", ".join(found.faults) or "equal"
    text = f"{verdict}: {found.changed} tensors changed, {found.values} values compared; stock's second load: {of_stock}"
    table.add("SGLang", capability, name, ", ".join(sorted(methods(fresh["found"]))), text)
    assert not found.faults
    assert found.changed >= 10 and found.values > 300
    wanted = sglang_cases.CASES[name].method
    assert any(wanted in method for method in methods(fresh["found"]))


def methods(found: dict[str, tuple]) -> set[str]:
    """Return the class names of the quantization methods of linear layers and experts that a snapshot shows."""
    names = {what[1].rpartition(".")[2] for what in found.values() if what[0] == "type"}
    return {name for name in names if name.endswith(("LinearMethod", "MoEMethod"))}
