"""A memory budget for captured graphs drops arms, says so, and refuses what holds none."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.bandit.arm import OFF, Arm, parse_arms
from flashpatch.patches.eagle.bandit.graph_budget import GIB, arms_within, estimate_bytes, reachable_sizes
from flashpatch.patches.eagle.sglang import spec_controller as sglang
from flashpatch.patches.eagle.vllm import spec_controller as vllm
from flashpatch.patches.eagle.vllm.graph_sizes import arms_in_graphs

ARMS = parse_arms("disable,1_1_2,2_1_3,3_1_4,4_1_5,8_1_9")
OPTIONS = {name: option.default for name, option in FAMILY.options.items()}
LAYERS = 32


def _names(arms) -> list[str]:
    return [str(arm) for arm in arms]


def _needed(arms, graphs: int = 50) -> float:
    return sum(estimate_bytes(arm, graphs, LAYERS) for arm in arms) / GIB


def _within(budget, arms=ARMS, graphs=50, **more):
    return arms_within(arms, budget, lambda arm: graphs, LAYERS, **more)


def test_a_budget_of_zero_or_one_that_holds_all_drops_nothing_and_says_nothing(caplog):
    assert _within(0) == ARMS
    assert _within(_needed(ARMS)) == ARMS
    assert not caplog.records


@pytest.mark.parametrize("missing", [1, 2, 3, 4])
def test_arms_that_nearly_do_the_work_of_a_neighbour_go_first_and_the_log_names_them(caplog, missing):
    kept = [OFF, "1_1_2", "8_1_9", "2_1_3", "3_1_4", "4_1_5"][: len(ARMS) - missing]
    budget = _needed(parse_arms(kept))
    with caplog.at_level(logging.WARNING, "flashpatch.eagle"):
        found = _within(budget)
    assert set(_names(found)) == set(kept)
    assert _needed(found) <= budget
    assert all(str(arm) in caplog.text for arm in ARMS if arm not in found)
    assert "estimated" in caplog.text and "graph_memory" in caplog.text


def test_a_budget_that_holds_no_drafting_arm_is_refused():
    with pytest.raises(PatchError) as raised:
        _within(_needed(ARMS[:1]))
    assert "does not hold the graphs of one arm" in str(raised.value)


def test_required_arms_stay_and_count():
    own = Arm.parse("8_1_9")
    budget = _needed([own, Arm.DISABLE, Arm.parse("1_1_2")])
    assert _names(_within(budget, required=(own, Arm.DISABLE))) == [OFF, "1_1_2", "8_1_9"]


def test_graphs_are_captured_up_to_the_first_size_that_holds_the_guards_largest_batch():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    arm = Arm.parse("3_1_4")
    assert reachable_sizes(sizes, arm, 40) == [1, 2, 4, 8, 16]  # batches up to 10 run in the graph of 16
    assert reachable_sizes(sizes, arm, 32) == [1, 2, 4, 8]
    assert reachable_sizes(sizes, arm, 10_000) == sizes
    assert reachable_sizes(sizes, arm, 1) == [1]
    assert reachable_sizes(sizes, Arm.DISABLE, 1) == sizes


def _args(**more):
    said = dict(enforce_eager=False, cudagraph_capture_sizes=None, max_num_seqs=256)
    config = SimpleNamespace(cudagraph_capture_sizes=None)
    return SimpleNamespace(**{**said, "compilation_config": config, **more})


def test_vllm_counts_the_sizes_that_it_captures():
    fewer = arms_in_graphs(ARMS, _args(), LAYERS, 4.0)
    assert Arm.DISABLE in fewer and 1 < len(fewer) < len(ARMS)
    assert arms_in_graphs(ARMS, _args(enforce_eager=True), LAYERS, 0.001) == ARMS
    assert arms_in_graphs(ARMS, _args(cudagraph_capture_sizes=[1, 8]), LAYERS, 4.0) == ARMS
    named = SimpleNamespace(cudagraph_capture_sizes=[1, 8])
    assert arms_in_graphs(ARMS, _args(compilation_config=named), LAYERS, 4.0) == ARMS


def test_vllms_scheduler_makes_the_arms_that_the_schedule_names():
    fewer = arms_in_graphs(ARMS, _args(), LAYERS, 4.0)
    steps = {row[2] for row in vllm.arms_schedule(fewer)}
    options = {**OPTIONS, "arms": _names(ARMS)}
    assert vllm.make_policy(options, 8, steps).arms == fewer
    assert vllm.make_policy(options, 8).arms == ARMS


def test_sglang_drops_arms_and_captures_no_size_that_the_guard_forbids():
    own = Arm.parse("8_1_9")
    sizes = [1, 2, 4, *range(8, 257, 8)]
    options = {**OPTIONS, "arms": _names(ARMS), "graph_memory": 1.7, "guard": 256}
    policy = sglang.make_policy(options, own, sizes=sizes, layers=LAYERS)
    assert own in policy.arms and Arm.DISABLE in policy.arms and 2 < len(policy.arms) < len(ARMS)
    assert sglang.make_policy(options, own).arms == ARMS  # an engine without graphs
    steps = sglang.BanditStepsPolicy(SimpleNamespace(policy=policy))
    assert steps.cuda_graph_bs_for_step(1) is None
    steps.set_cuda_graph_bs(sizes)
    assert max(steps.cuda_graph_bs_for_step(1)) == 128
    assert steps.cuda_graph_bs_for_step(0) == sizes
    for size in range(1, 257):  # a batch that may run an arm finds a graph
        for arm in policy.allowed(size):
            assert max(steps.cuda_graph_bs_for_step(arm.steps)) >= size
