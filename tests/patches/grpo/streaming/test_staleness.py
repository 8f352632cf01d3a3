"""Ages of samples in versions of the policy."""

from __future__ import annotations

from flashpatch.patches.grpo.streaming.staleness import histogram


def test_a_sample_of_the_version_that_is_trained_has_age_0():
    tags = [{"min_global_steps": version} for version in (4, 4, 3, 0)]
    found = histogram(tags, step=5)
    assert [found[f"stream/staleness/{age}"] for age in (0, 1, 2, 3)] == [0.5, 0.25, 0, 0]
    assert found["stream/staleness/4_or_more"] == 0.25
    assert found["stream/staleness/max"] == 4 and found["stream/staleness/mean"] == 1.25


def test_samples_without_a_version_are_left_out():
    assert histogram([{"min_global_steps": None}, {}], step=3) == {}
    assert histogram([{"min_global_steps": None}, {"min_global_steps": 2}], step=3)["stream/staleness/0"] == 1
