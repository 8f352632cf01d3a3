"""What one more bucket costs, in calls: they are the same on a busy machine as on a quiet one."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.patches.fp8 import refit

OURS = str(Path(refit.__file__).resolve().parent)
BLOCKS = 12
A, B = (toys.checkpoint(seed, blocks=BLOCKS) for seed in range(2))


def counted(method: str, buckets: int) -> tuple[int, int]:
    """Update an engine in so many buckets; return the calls that code of `refit` received and made, and its layers."""
    engine = toys.Engine(toys.Model(method, blocks=BLOCKS), A)
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    points = [len(B) * number // buckets for number in range(1, buckets)]
    sys.setprofile(count)
    try:
        for bucket in toys.cut(B, *points):
            engine.load(bucket)
    finally:
        sys.setprofile(None)
    engine.managed.finish()
    expected = toys.Model(method, blocks=BLOCKS)
    expected.load_weights(B)
    toys.process_all(expected)
    assert toys.same_answers(engine.model, expected)
    return calls, len(engine.managed.layers)


@pytest.mark.parametrize("method", ["bare", "handled"])
def test_one_more_bucket_is_a_few_calls_per_layer(method: str) -> None:
    few, layers = counted(method, 4)
    many, _ = counted(method, 44)
    each = (many - few) / 40 / layers
    assert each < 20, f"each bucket more costs {each:.1f} calls per layer"
