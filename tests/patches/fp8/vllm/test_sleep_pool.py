"""The emulated pool of sleep mode: whose memory goes away, what stays, what each wake-up brings back."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sleep_pool import SleepPool  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def all_nan(tensor: Any) -> bool:
    return bool(tensor.isnan().all())


@pytest.fixture
def pool() -> SleepPool:
    return SleepPool()


def test_memory_of_every_operator_goes_away_and_no_other(pool: SleepPool) -> None:
    before = torch.ones(4)
    with pool.use_memory_pool("weights"):
        inside = {
            "factory": torch.ones(4),
            "result": before + 1,
            "converted": before.to(torch.bfloat16),
            "clone": before.clone(),
            "numbers": torch.tensor([1.0, 2.0]),
            "parameter": torch.nn.Linear(2, 2).weight.detach(),
        }
        view, on_host = before.view(2, 2), before.to("cpu", copy=True)
    after = torch.ones(4)
    pool.sleep(kept=())
    assert {name: all_nan(tensor) for name, tensor in inside.items()} == dict.fromkeys(inside, True)
    assert [float(tensor.sum()) for tensor in (before, view, on_host, after)] == [4.0] * 4


def test_memory_allocated_under_another_mode_goes_away(pool: SleepPool) -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with pool.use_memory_pool("weights"), Other():
        tensor = torch.ones(4)
    pool.sleep(kept=())
    assert all_nan(tensor)


def test_a_wake_up_brings_back_what_was_kept_under_its_tags(pool: SleepPool) -> None:
    with pool.use_memory_pool("weights"):
        weight = torch.arange(4.0)
    with pool.use_memory_pool("kv_cache"):
        cache = torch.arange(4.0)
    pool.sleep(kept=("weights",))
    assert all_nan(weight)
    pool.wake_up(["kv_cache"])
    assert all_nan(weight) and cache.isfinite().all() and cache.tolist() != [0, 1, 2, 3]
    pool.wake_up(["weights"])
    assert weight.tolist() == [0, 1, 2, 3]
    pool.discard(["weights"])
    pool.wake_up()
    assert all_nan(weight)


def test_what_is_written_while_asleep_is_lost(pool: SleepPool) -> None:
    with pool.use_memory_pool("weights"):
        weight = torch.ones(4)
    pool.sleep(kept=())
    weight.fill_(1)
    pool.wake_up(["weights"])
    assert all_nan(weight)


def test_garbage_is_nan_and_finite_in_turn(pool: SleepPool) -> None:
    with pool.use_memory_pool("weights"):
        weight = torch.ones(4)
    for nan in (True, False, True):
        pool.sleep(kept=())
        pool.wake_up()
        assert all_nan(weight) == nan and weight.isfinite().all() == (not nan)
        assert len(pool.lost()) == 1
        weight.fill_(1)
        assert not pool.lost()


def test_memory_that_nobody_uses_leaves_the_pool(pool: SleepPool) -> None:
    with pool.use_memory_pool("weights"):
        weight = torch.ones(4)
        view = weight[1:]
    assert pool.nbytes("weights") == 16
    del weight
    assert pool.nbytes("weights") == 16
    del view
    assert pool.nbytes("weights") == 0
