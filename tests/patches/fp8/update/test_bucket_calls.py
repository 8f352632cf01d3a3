"""What one more bucket costs, in calls: they are the same on a busy machine as on a quiet one."""

import sys
from pathlib import Path

import fp8_toys as toys
import pytest

from flashpatch.patches.fp8 import update

OURS = str(Path(update.__file__).resolve().parent)


def counted(buckets: int, blocks: int) -> int:
    """Update an engine in so many buckets; return the calls that code of `refit` received and made."""
    first, second = (toys.checkpoint(seed, blocks=blocks) for seed in range(2))
    engine = toys.Engine(toys.Model("handled", blocks=blocks), first)
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    points = [len(second) * number // buckets for number in range(1, buckets)]
    sys.setprofile(count)
    try:
        for bucket in toys.cut(second, *points):
            engine.load(bucket)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("blocks", [10, 50])
def test_one_more_bucket_costs_what_it_brings_however_large_the_model(blocks: int) -> None:
    each = (counted(44, blocks) - counted(22, blocks)) / 22
    assert each < 120, f"each bucket more costs {each:.0f} calls in a model of {blocks} blocks"
