"""A measurement of time is believed for as long as times have been seen not to spread."""

import random
from collections import Counter

from flashpatch.patches.eagle.bandit.policy import Policy

ARMS = ("disable", "1_1_2", "3_1_4")


def _looks(noise: float, seed: int) -> int:
    """Steps that went to other arms than the one preferred, after the beginning."""
    policy, source, ran = Policy(ARMS, rule="thompson", seed=seed), random.Random(seed), Counter()
    tokens, seconds = {"disable": 1, "1_1_2": 1.6, "3_1_4": 2.6}, {"disable": 1.0, "1_1_2": 1.2, "3_1_4": 1.6}
    for step in range(800):
        arm = policy.select(8)
        policy.update(8, arm, 8 * tokens[str(arm)], seconds[str(arm)] * source.lognormvariate(0.0, noise))
        if step >= 200:
            ran[str(arm)] += 1
    return 600 - ran.most_common(1)[0][1]


def test_other_arms_are_looked_at_again_where_times_spread():
    quiet, noisy = (sum(_looks(noise, seed) for seed in range(5)) for noise in (0.02, 0.6))
    assert quiet < 60 < 3 * quiet + 60 < noisy
