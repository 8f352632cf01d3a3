"""vLLM's CUDA branch on the fake device: after an update, every tensor, value and address is that of a fresh load.

What this shows and what not: tests/support/fake_cuda/README.md."""

import pytest
from cuda_lab import cases, mutants
from cuda_lab.compare import compare
from cuda_lab.lane import NEEDS_DEVICE, Run, parameters
from installed import version_of
from packaging.version import Version

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]


def of(mode: str, capability: int, names: tuple[str, ...] = (), **more: str) -> Run:
    """All cases of a capability in one process, or those named."""
    return Run("storage", mode, capability, names or tuple(cases.of(capability)), tuple(more.items()))


FRESH = {capability: of("fresh", capability) for capability in (80, 89, 90, 100, 120)}
UPDATED = {capability: of("update", capability) for capability in FRESH}
ALL = parameters(cases.of, FRESH, UPDATED)
AT_ONCE = of("update", 90, cases.AT_ONCE, ATOMIC="model")


def with_fault(mutant: str) -> Run:
    how = mutants.ATOMIC.get(mutant, "layer")
    return of("update", 90, (mutants.CAUGHT_BY[mutant],), CUDA_LAB_MUTANT=mutant, ATOMIC=how)


@pytest.mark.parametrize(("capability", "name"), ALL)
def test_an_update_is_a_fresh_load(lane, capability: int, name: str) -> None:
    check(name, lane.result(FRESH[capability])[name], lane.result(UPDATED[capability])[name], capability)


@pytest.mark.runs(FRESH[90], AT_ONCE)
@pytest.mark.parametrize("name", cases.AT_ONCE)
def test_at_once_it_is_a_fresh_load_too(lane, name: str) -> None:
    """Under atomic=model, which carries all out at the end."""
    check(name, lane.result(FRESH[90])[name], lane.result(AT_ONCE)[name], 90)


def check(name: str, fresh: dict, updated: dict, capability: int) -> None:
    assert "error" not in fresh and "error" not in updated, (fresh.get("error"), updated.get("error"))
    # a refused launch can be silent: nothing was computed
    assert (fresh["launches"], updated["launches"]) == (0, 0)
    found = compare(fresh, updated)
    assert not found.faults
    assert found.changed >= cases.CASES[name].changed and found.values > 400
    wanted = cases.CASES[name].kernels[capability]
    assert not wanted or any(wanted in kernel for kernel in found.kernels), found.kernels


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=pytest.mark.runs(FRESH[90], with_fault(name))) for name in mutants.CAUGHT_BY],
)
def test_a_planted_fault_is_seen(lane, mutant: str) -> None:
    name, updated = mutants.CAUGHT_BY[mutant], with_fault(mutant)
    got = lane.result(updated)[name]
    assert "error" not in got
    assert compare(lane.result(FRESH[90])[name], got).faults.get("differing")


OPENS_GPT_OSS = version_of("vllm") >= Version(cases.CASES["gpt_oss_fp8"].least)
LOST = [Run("storage", mode, 90, ("gpt_oss_fp8",)) for mode in ("fresh", "update")]


@pytest.mark.skipif(not OPENS_GPT_OSS, reason="this vLLM opens no GPT-OSS from a checkpoint in bf16")
@pytest.mark.runs(*LOST if OPENS_GPT_OSS else ())
def test_a_first_load_that_loses_experts_is_refused(lane) -> None:
    """Stock opens GPT-OSS in online fp8 without its experts: the model copies them into tensors on meta."""
    stock, ours = (lane.result(run)["gpt_oss_fp8"] for run in LOST)
    assert "error" not in stock
    assert "past the weight loaders" in ours["error"] and "w13_weight" in ours["error"]
