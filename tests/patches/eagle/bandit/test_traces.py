"""Traces that `benchmarks/bandit.py` replays: read back as written, and what a damaged one is told."""

from statistics import fmean

import bandit
import bandit_fastrl
import bandit_traces
import pytest
from tree import TREE

RECORDED = sorted((TREE / "benchmarks" / "traces").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_the_bandit_is_near_the_best_fixed_arm_and_ahead_of_the_published_rules(path):
    trace = bandit_traces.read(path)
    best = max(bandit.fixed(trace).values())
    shares = {
        rule: fmean(bandit.replay(trace, rule, seed).rate for seed in range(4)) / best
        for rule in (bandit.OURS, *bandit_fastrl.PUBLISHED)
    }
    assert shares[bandit.OURS] > 0.95 and shares[bandit.OURS] == max(shares.values()), shares
