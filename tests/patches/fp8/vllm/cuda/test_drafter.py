"""A drafter's captured graphs: after an update of policy and drafter, each arm of the bandit answers and drafts as in a fresh engine.

What the fake device shows and what not: tests/support/fake_cuda/README.md."""

import pytest
from cuda_lab.lane import NEEDS_DEVICE, Run
from installed import version_of
from packaging.version import Version

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]

# vLLM 0.24 opens its first runner for them, on which these engines ran no graph
ON_THE_FIRST_RUNNER = version_of("vllm") < Version("0.33")
ARMS = ("0", "1", "2", "3")
FRESH, UPDATED = (Run("drafts", mode, 90, ARMS) for mode in ("fresh", "update"))


@pytest.mark.runs(FRESH, UPDATED)
@pytest.mark.parametrize("arm", ARMS)
def test_graphs_of_policy_and_drafter_follow_an_update(lane, arm: str) -> None:
    fresh, updated = lane.result(FRESH)[arm], lane.result(UPDATED)[arm]
    before, same = updated["before"], ("answers", "drafts", "accepted", "replayed", "graphs")
    differing = [name for name in same if updated[name] != fresh[name]]
    assert not differing and not updated["moved"]
    assert before["answers"] != updated["answers"]
    assert (updated["drafts"] > 0) == (before["accepted"] < updated["accepted"]) == (arm != "0")
    assert (fresh["launches"], updated["launches"]) == (0, 0)
    if ON_THE_FIRST_RUNNER:
        return
    # the policy verifies that many at once, the drafter makes all but the first of them in one graph
    assert {f"ModelCudaGraphManager {int(arm) + 1}", f"SpeculatorCudaGraphManager {int(arm) + 1}"} <= set(
        updated["replayed"]
    )
    assert int(arm) < 2 or f"SpeculatorCudaGraphManager 1 {arm}" in updated["replayed"]
