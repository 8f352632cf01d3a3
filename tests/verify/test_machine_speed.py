"""The factor that scales time-outs, with an injected clock."""

import pytest

from flashpatch.verify.machine_speed import COMPILE_SECONDS, REPEATS, measure


@pytest.mark.parametrize(
    ("python", "cores", "factor"),
    [(1.0, 2, 1.0), (0.1, 16, 1.0), (3.0, 2, 3.0), (1.5, 1, 3.0), (40.0, 2, 8.0)],
)
def test_it_lies_between_1_and_8(python, cores, factor):
    readings = iter([10.0, 10.0 + python * COMPILE_SECONDS * REPEATS])
    assert measure(lambda: next(readings), cores) == pytest.approx(factor)


def test_this_machine_is_within_bounds():
    assert 1.0 <= measure() <= 8.0
