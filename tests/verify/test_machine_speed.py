"""The factor that scales time-outs, with an injected clock."""

import itertools
from collections.abc import Callable

import pytest

from flashpatch.verify import machine_speed
from flashpatch.verify.machine_speed import COMPILE_SECONDS, PRODUCT_SECONDS, REPEATS, measure


def clock(*spent: float) -> Callable[[], float]:
    """A clock that shows these seconds between its first and second reading, its third and fourth, and so on."""
    readings = itertools.chain.from_iterable((10.0, 10.0 + seconds) for seconds in spent)
    return lambda: next(readings)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_product", lambda: lambda: None)


@pytest.mark.parametrize(
    ("python", "matrix", "cores", "factor"),
    [
        (1.0, 1.0, 2, 1.0),
        (0.1, 0.2, 16, 1.0),
        (3.0, 1.0, 2, 3.0),
        (1.0, 2.5, 2, 2.5),
        (1.5, 1.0, 1, 3.0),
        (40.0, 1.0, 2, 8.0),
    ],
)
def test_the_slower_workload_counts_between_1_and_8(product, python, matrix, cores, factor):
    spent = clock(python * COMPILE_SECONDS * REPEATS, matrix * PRODUCT_SECONDS * REPEATS)
    assert measure(spent, cores) == pytest.approx(factor)


def test_without_numpy_python_alone_counts(monkeypatch):
    monkeypatch.setattr(machine_speed, "_product", lambda: None)
    assert measure(clock(2 * COMPILE_SECONDS * REPEATS), 2) == pytest.approx(2.0)


def test_it_is_measured_once_per_process(monkeypatch):
    monkeypatch.setattr(machine_speed, "_factor", None)
    factors = iter([2.0, 5.0])
    monkeypatch.setattr(machine_speed, "measure", lambda: next(factors))
    assert [machine_speed.scaled(10.0), machine_speed.factor()] == [20.0, 2.0]


def test_this_machine_is_within_bounds():
    assert 1.0 <= measure() <= 8.0
