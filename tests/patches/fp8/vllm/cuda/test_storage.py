"""vLLM's CUDA branch on the fake device: after an update, every tensor, value and address is that of a fresh load.

What this shows and what not: tests/support/fake_cuda/README.md.
"""

from __future__ import annotations

import functools

import pytest
from cuda_lab import cases, mutants, runs
from cuda_lab.compare import compare

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not runs.is_built(), reason="the fake CUDA device is not built here"),
]

ALL = [(capability, name) for capability in (80, 89, 90, 100) for name in cases.of(capability)]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results of a mode on a capability, all of its cases in one process."""
    folder = tmp_path_factory.mktemp("cuda")

    @functools.cache
    def run(mode: str, capability: int, names: tuple[str, ...] = (), **more: str):
        return runs.run(folder, "storage", mode, capability, list(names) or cases.of(capability), **more)

    return run


@pytest.mark.parametrize(
    ("capability", "name"), ALL, ids=[f"{name}-{capability}" for capability, name in ALL]
)
def test_an_update_is_a_fresh_load(results, capability: int, name: str) -> None:
    check(name, results("fresh", capability)[name], results("update", capability)[name], capability)


@pytest.mark.parametrize("name", cases.AT_ONCE)
def test_at_once_it_is_a_fresh_load_too(results, name: str) -> None:
    """Under atomic=model, which carries all out at the end."""
    updated = results("update", 90, cases.AT_ONCE, ATOMIC="model")[name]
    check(name, results("fresh", 90)[name], updated, 90)


def check(name: str, fresh: dict, updated: dict, capability: int) -> None:
    assert "error" not in fresh and "error" not in updated, (fresh.get("error"), updated.get("error"))
    assert (fresh["launches"], updated["launches"]) == (
        0,
        0,
    )  # a refused launch can be silent: nothing was computed
    found = compare(fresh, updated)
    assert not found.faults
    assert found.changed >= cases.CASES[name].changed and found.values > 400
    wanted = cases.CASES[name].kernels[capability]
    assert not wanted or any(wanted in kernel for kernel in found.kernels), found.kernels


@pytest.mark.parametrize("mutant", mutants.MUTANTS)
def test_a_planted_fault_is_seen(results, mutant: str) -> None:
    name = mutants.CAUGHT_BY[mutant]
    updated = results(
        "update", 90, (name,), CUDA_LAB_MUTANT=mutant, ATOMIC=mutants.ATOMIC.get(mutant, "layer")
    )[name]
    assert "error" not in updated
    assert compare(results("fresh", 90)[name], updated).faults.get("differing")


@pytest.mark.parametrize("name", ["fp8", "static_kv"])
def test_stock_s_second_load_is_not_a_fresh_one(results, name: str) -> None:
    """What users have without FlashPatch: an error, or storage that differs."""
    stock = results("update", 80, ("fp8", "static_kv"), FLASHPATCH="0")[name]
    assert "error" in stock or compare(results("fresh", 80)[name], stock).faults


def test_no_case_is_without_a_device() -> None:
    assert set(cases.CASES) == {name for _, name in ALL} | {"large"}
