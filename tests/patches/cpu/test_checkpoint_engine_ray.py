"""verl's own manager under Ray: what goes wrong in a rollout ends the sync by name, and the next one begins anew."""

from __future__ import annotations

import json

import cpu_lab
import pytest
import warm
from machine import limit
from tree import SUPPORT

pytestmark = [pytest.mark.verl, pytest.mark.full]


def total(step: int) -> float:
    """What a rollout holds after the trainer's export of that number: 10 tensors of 100,000 elements."""
    return 10 * 100_000.0 * step


def test_a_sync_that_fails_names_the_rollout_and_the_next_begins_anew(tmp_path):
    done = warm.run(
        warm.VERL,
        [SUPPORT / "gloo_ray.py"],
        env=cpu_lab.environment(tmp_path, FLASHPATCH="cpu"),
        cwd=tmp_path,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["1"] == {"error": None, "held": [total(1), total(1)]}
    # the second replica's adapter raised; nobody waited 600 s, the engine's time-out
    assert "LookupError: cannot place this tensor" in found["2"]["error"]
    assert found["2"]["held"] == [total(1), total(1)]
    assert found["3"] == {"error": None, "held": [total(3), total(3)]}
    assert "ended" in found["4"]["error"] or "died" in found["4"]["error"], found["4"]
    assert found["5"] == {"error": None, "held": [total(5)]}
