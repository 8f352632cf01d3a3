"""Parts that need no engine."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.sglang import capture
from flashpatch.patches.eagle.sglang.spec_controller import BanditStepsPolicy, SpecController, engine_arms

pytestmark = pytest.mark.sglang(least="0.5.17")

HOME = Arm(3, 2, 6)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.booleans(),
)
def test_rows_of_the_accepted_path(requests: list[tuple[int, int]], wider: int, chain: bool) -> None:
    """Each accepted input comes with its position and the state at it; a state here is (token, position)."""
    depth, nodes = 4, 4 if chain else 4 + wider
    firsts = torch.tensor([first for first, _ in requests])
    counts = [min(count, depth) for _, count in requests]
    # inputs, then the bonus token
    paths = [[100 * r + j for j in range(count + 1)] for r, count in enumerate(counts)]
    after = torch.full((len(requests), nodes), -7)
    hidden = torch.full((len(requests), nodes, 2), -7.0)
    for r, path in enumerate(paths):
        for j in range(counts[r]):
            after[r, j] = path[j + 1]
            hidden[r, j] = torch.tensor([path[j], int(firsts[r]) + j], dtype=torch.float32)
    roots = torch.tensor([[path[0]] for path in paths])
    ids, positions, rows = capture.accepted_rows(roots, firsts, after.flatten(), hidden.view(-1, 2), depth)
    assert ids.shape == positions.shape == (len(requests), depth) and rows.shape == (len(requests) * depth, 2)
    for r, count in enumerate(counts):
        assert ids[r, :count].tolist() == paths[r][:count]
        want = torch.stack([ids[r, :count], positions[r, :count]], 1).float()
        assert torch.equal(rows.view(len(requests), depth, 2)[r, :count], want)
    hidden.zero_()
    assert (rows != 0).any(), "the rows are the engine's own memory, which it uses again"


def test_positions_start_behind_the_cached_prefix() -> None:
    assert capture.positions_of([0, 7], [3, 2]).tolist() == [0, 1, 2, 7, 8]


def test_arms_are_what_the_engine_has_room_for() -> None:
    arms = engine_arms([], HOME)
    assert arms[0] == HOME and arms[-1] == Arm.DISABLE and len(set(arms)) == len(arms)
    assert all(a.steps <= 3 and a.topk <= 2 and a.draft_tokens <= 6 for a in arms)
    assert engine_arms(["2_2_4", "disable"], HOME) == (Arm(2, 2, 4), Arm.DISABLE)
    for large in ("4_1_5", "2_3_4", "3_2_7"):
        with pytest.raises(PatchError, match=f"arm {large} is larger"):
            engine_arms([large], HOME)


def test_a_step_is_rewarded_with_its_own_time() -> None:
    """Also when the next step has begun before this one's counts are known."""
    now = [0.0]
    policy = Policy(["3_1_4", "disable"], seed=1)
    got: list[tuple[int, Arm, float, float]] = []
    policy.update = lambda *seen: got.append(seen)  # type: ignore[method-assign]
    controller = SpecController(policy, clock=lambda: now[0])
    controller.note = lambda: None  # type: ignore[method-assign]
    first = controller.choose(2)
    now[0] = 1.0
    second = controller.choose(2)
    now[0] = 1.5
    controller.step_finished([1, 2], 2)
    now[0] = 2.5
    controller.step_finished([0, 0], 2)
    assert got == [(2, first, 5, 1.5), (2, second, 2, 1.0)] and controller.finished == second
    controller.step_finished([1], 1)  # nothing was chosen for it: a drained batch
    assert len(got) == 2


def test_the_protocol_of_sglangs_adaptive_controller() -> None:
    chains = BanditStepsPolicy(SpecController(Policy(["3_1_4", "1_1_2"], seed=1), clock=lambda: 1.0))
    assert chains.candidate_steps == [0, 1, 3]
    chains.set_cuda_graph_bs([1, 2])
    assert chains.cuda_graph_bs_for_step(3) == [1, 2]
    chains.set_cuda_graph_bs([*range(8, 1025, 8)])
    assert max(chains.cuda_graph_bs_for_step(3)) == 512, "the guard lets no larger batch draft 3 tokens"
    assert max(chains.cuda_graph_bs_for_step(0)) == 1024
    assert chains.get_steps_for_batch(4) in (1, 3)
    assert chains.on_verify_complete([1, 0, 2, 1], 4) is None


def test_a_retracted_request_gives_its_rows_up(monkeypatch) -> None:
    """It may be aborted while it waits, and SGLang releases nothing then."""
    passed = []
    monkeypatch.setattr(capture, "_recorder", types.SimpleNamespace(finish=passed.append))
    for over in (False, True):
        request = types.SimpleNamespace(
            rid="one", origin_input_ids=[1, 2], output_ids_through_stop=[3], finished=lambda over=over: over
        )
        assert capture.release_kv_cache(lambda req, tree: tree, request, "tree") == "tree"
    assert passed == [{"one": ([], 2)}, {"one": ([1, 2, 3], 2)}]
