"""Calls to workers that may fail on some of them."""

import sys
import types

import pytest

pytest.importorskip("cloudpickle")

from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def load(self, factor: int, plus: int = 0) -> int:
        if self.rank == 1 and factor == 0:
            raise PatchError("layers.0.down.weight did not come", patch="fp8.update")
        return self.rank * factor + plus


@pytest.fixture(autouse=True)
def serial_utils(monkeypatch):
    """vLLM's ``run_method``: a name, a callable, or a pickled callable."""

    def run_method(worker, method, args, kwargs):
        if isinstance(method, bytes):
            import cloudpickle

            return cloudpickle.loads(method)(worker, *args, **kwargs)
        return getattr(worker, method)(*args, **kwargs)

    module = types.ModuleType("vllm.v1.serial_utils")
    module.run_method = run_method
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def call(method, args=(), kwargs=None, ranks: int = 3):
    guarded, its_args = all_ranks.wrap(method, args, kwargs)
    return all_ranks.unwrap([guarded(Worker(rank), *its_args) for rank in range(ranks)])


def test_results_pass_through():
    assert call("load", (2,), {"plus": 1}) == [1, 3, 5]
    assert call("load", (2,)) == [0, 2, 4]
    assert call(lambda worker, by: worker.rank + by, (10,)) == [10, 11, 12]


def test_all_ranks_are_heard_and_those_that_failed_are_named():
    with pytest.raises(RuntimeError, match=r"rank 1: PatchError: .*did not come") as caught:
        call("load", (0,))
    assert "Traceback" in str(caught.value) and "rank 0" not in str(caught.value)

    def fails(worker):
        if worker.rank:
            raise ValueError(f"at {worker.rank}")

    with pytest.raises(RuntimeError, match="rank 1: ValueError: at 1; rank 2: ValueError: at 2"):
        call(fails)


def test_an_exception_that_cannot_be_pickled_travels_as_text():
    class Odd(Exception):
        def __reduce__(self):
            raise TypeError("no pickle")

    def fails(worker):
        raise Odd("but seen")

    with pytest.raises(RuntimeError, match="Odd: but seen"):
        call(fails)
