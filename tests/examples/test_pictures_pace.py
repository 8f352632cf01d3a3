"""The picture of reward by seconds of training."""

from __future__ import annotations

import pytest
from example_pictures import imported, lines, units

SEEDS = [
    {"seconds": [10.0, 20.0, 30.0, 40.0], "reward": [0.0, 0.2, 0.4, 0.6]},
    {"seconds": [12.0, 24.0, 36.0, 48.0], "reward": [0.2, 0.4, 0.6, 0.8]},
]


def test_the_thick_line_goes_through_the_means_of_seeds_by_their_seconds():
    pytest.importorskip("matplotlib")
    with imported() as pictures:
        jobs = {"bf16, tis": SEEDS, "int8, tis": SEEDS[:1]}
        axes = pictures.figure({"picture": "reward by seconds", "jobs": jobs}).axes[0]
    assert lines(axes) == {
        "bf16, tis": pytest.approx([0.1, 0.2, 0.3, 0.5]),  # means of three steps
        "int8, tis": pytest.approx([0.0, 0.1, 0.2, 0.4]),
    }
    thick, thin = (
        [line for line in axes.get_lines() if line.get_label().startswith("_") is hidden]
        for hidden in (False, True)
    )
    assert list(thick[0].get_xdata()) == [11.0, 22.0, 33.0, 44.0]
    assert [list(line.get_xdata()) for line in thin] == [seed["seconds"] for seed in (*SEEDS, SEEDS[0])]
    assert units(axes) == ("seconds of training", "mean reward of a step")
