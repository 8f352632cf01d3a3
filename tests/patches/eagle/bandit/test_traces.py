"""Traces that `benchmarks/bandit.py` replays: read back as written, and what a damaged one is told."""

from __future__ import annotations

import gzip
from statistics import fmean

import bandit
import bandit_fastrl
import bandit_traces
import pytest
from tree import TREE

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.bandit.rules import DEFAULT, thompson

RECORDED = sorted((TREE / "benchmarks" / "traces").glob("*.jsonl.gz"))
HEAD = '{"source": "test", "switch_seconds": 0.001}\n'
STEP = '{"batch": 2, "arms": {"disable": [2, 0.01], "1_1_2": [3, 0.012]}}\n'


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_traces_are_whole_and_speculation_matters_there(path):
    trace = bandit_traces.read(path)
    rates = bandit.fixed(trace)
    assert len(trace.steps) > 500 and len(rates) > 3
    assert max(rates.values()) > 1.1 * min(rates.values())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_the_default_is_near_the_best_fixed_arm_and_ahead_of_the_published_rules(path):
    trace = bandit_traces.read(path)
    best = max(bandit.fixed(trace).values())
    shares = {
        rule: fmean(bandit.replay(trace, rule, seed).rate for seed in range(4)) / best
        for rule in (DEFAULT, *bandit_fastrl.PUBLISHED)
    }
    assert shares[DEFAULT] > 0.95 and shares[DEFAULT] == max(shares.values()), shares


def test_a_packed_trace_is_read_as_a_plain_one(tmp_path):
    (tmp_path / "a.jsonl").write_text(HEAD + STEP)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((HEAD + STEP).encode()))
    assert bandit_traces.read(tmp_path / "a.jsonl") == bandit_traces.read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("line", [STEP.replace("0.012", "0"), STEP.replace('"1_1_2"', '"1_1_x"'), "{", "[]"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(HEAD + STEP + line + "\n")
    with pytest.raises(PatchError, match="line 3"):
        bandit_traces.read(path)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_step_added_in_place_teaches_exactly_what_step_times_would(path, monkeypatch):
    trace = bandit_traces.read(path)

    def learned():
        policy = Policy(trace.arms, seed=3)
        bandit.run(trace, policy.select, policy.update)
        return policy.state()

    in_place = learned()
    monkeypatch.setattr(thompson, "MAX_WEIGHT", 0.0)  # every step goes through `StepTimes.add`
    assert learned() == in_place
