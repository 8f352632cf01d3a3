"""log Z estimated from a group: against its equation in plain numbers, and inside verl's own driver and actor."""

import math
from types import SimpleNamespace

import pytest
import torch
import warm
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.loss import less_log_z
from flashpatch.patches.flowrl.objective import balance, group_log_z

DEFAULTS = {name: option.default for name, option in options.OPTIONS.items()}


def padded(rows):
    width = max(map(len, rows))
    mask = torch.tensor([[at < len(row) for at in range(width)] for row in rows])
    return torch.tensor([[*row, *[9.0] * (width - len(row))] for row in rows], dtype=torch.float64), mask


LOGPS = st.lists(st.floats(-3, -0.01), min_size=1, max_size=5)
ROWS = st.tuples(LOGPS, st.floats(-1, 1), st.floats(-2, 2), st.integers(0, 2))


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=9), st.sampled_from(["mean", "sum"]), st.floats(0.1, 20))
def test_it_solves_its_equation(drawn, length, beta):
    """In each group the average of p_ref / p exp(k (beta r - z)) is 1, where k is the length or 1."""
    log_prob, mask = padded([row[0] for row in drawn])
    ref_log_prob, _ = padded([[logp + row[1] / 3 for logp in row[0]] for row in drawn])
    reward = torch.tensor([[row[2]] * log_prob.shape[1] for row in drawn], dtype=torch.float64)
    groups = torch.tensor([row[3] for row in drawn])
    got = group_log_z(log_prob, ref_log_prob, reward, mask, groups, beta=beta, length=length).tolist()
    for group in {row[3] for row in drawn}:
        mine = [at for at, row in enumerate(drawn) if row[3] == group]
        (z,) = {got[at] for at in mine}
        terms = [
            math.exp(
                len(drawn[at][0]) * drawn[at][1] / 3
                + (len(drawn[at][0]) if length == "mean" else 1) * (beta * drawn[at][2] - z)
            )
            for at in mine
        ]
        assert math.fsum(terms) / len(terms) == pytest.approx(1, rel=1e-6)


def test_a_group_without_tokens_is_zero_and_does_not_count_elsewhere():
    ones = torch.ones(3, 2)
    mask = torch.tensor([[True, True], [False, False], [False, False]])
    nan = torch.tensor([[-1.0, -1.0], [math.nan, math.nan], [math.nan, math.nan]])
    got = group_log_z(nan, nan, ones, mask, torch.tensor([0, 0, 1]), beta=2.0, length="mean")
    assert got.tolist() == pytest.approx([2.0, 2.0, 0.0])


def batch(number=8):
    draw = torch.Generator().manual_seed(1)
    mask = torch.tensor([[at < 1 + row % 4 for at in range(4)] for row in range(number)])
    logs = {name: -torch.rand(number, 4, generator=draw) for name in ("old_log_probs", "ref_log_prob")}
    score = torch.randint(0, 2, (number, 1), generator=draw).float()
    rewards = {"token_level_rewards": score * 0.5 * mask, "advantages": score * mask}
    return {**logs, **rewards, "response_mask": mask.long()}


@pytest.mark.parametrize("length", ["mean", "sum"])
def test_the_advantages_have_it_whatever_the_split(length):
    """The loss of advantages less log Z with no log Z is the loss with it; no row depends on the order of rows."""
    chosen = SimpleNamespace(**{**DEFAULTS, "log_z": "group", "length": length, "beta": 3.0})
    whole, uids = batch(), ["b", "a", "b", "c", "a", "a", "c", "b"]
    got = less_log_z(whole, uids, chosen)
    mask = whole["response_mask"].bool()
    advantages, groups = whole["advantages"], torch.tensor([1, 0, 1, 2, 0, 0, 2, 1])
    given = whole["old_log_probs"], whole["ref_log_prob"], advantages, mask, groups
    log_z = group_log_z(*given, beta=3.0, length=length)
    terms = dict(beta=3.0, length=length, weight="none", low=0.2, high=0.2, cap=None)
    policy = whole["old_log_probs"] + 0.1
    args = (policy, whole["old_log_probs"], whole["ref_log_prob"])
    ours = balance(torch.zeros(8), *args, got, mask, **terms).residual
    wanted = balance(log_z, *args, whole["advantages"], mask, **terms).residual
    assert torch.allclose(ours, wanted, atol=1e-5)
    order = torch.tensor([5, 2, 7, 0, 3, 1, 6, 4])
    shuffled = less_log_z(
        {name: value[order] for name, value in whole.items()}, [uids[at] for at in order], chosen
    )
    assert torch.allclose(shuffled, got[order], atol=1e-6)


def test_it_is_of_the_policy_that_sampled():
    """An asynchronous trainer's policy has moved since, and a quantized rollout's is another."""
    chosen, whole = SimpleNamespace(**{**DEFAULTS, "log_z": "group"}), batch()
    moved = {
        **whole,
        "rollout_log_probs": whole["old_log_probs"],
        "old_log_probs": whole["old_log_probs"] - 1,
    }
    assert torch.equal(
        less_log_z(moved, list("aabbccdd"), chosen), less_log_z(whole, list("aabbccdd"), chosen)
    )


@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_prob", "uid"])
def test_a_batch_that_lacks_something_is_refused_by_name(name):
    whole = {key: value for key, value in batch().items() if key != name}
    uids = None if name == "uid" else list("aabbccdd")
    chosen = SimpleNamespace(**{**DEFAULTS, "log_z": "group"})
    with pytest.raises(PatchError, match=f"lacks {name}"):
        less_log_z(whole, uids, chosen)


@pytest.mark.verl
def test_verls_own_trainers_compute_it_and_stock_verl_does_not(tmp_path):
    """The old trainer's function and the new one's, which bound it before the family was on."""
    import cpu_lab

    cpu_lab.checked(
        """
        import sys
        sys.path.insert(0, TESTS)
        import numpy, torch
        import test_group_log_z as here
        import flashpatch
        from types import SimpleNamespace
        from verl import DataProto
        from verl.trainer.ppo import ray_trainer
        from verl.trainer.ppo.v1 import utils
        from flashpatch.patches.flowrl.loss import less_log_z
        uids = ["b", "a", "b", "c", "a", "a", "c", "b"]
        keys = [f"{uid}_{at}_0" for at, uid in enumerate(uids)]
        def advantages(new):
            tensors = {k: v for k, v in here.batch().items() if k != "advantages"}
            data = DataProto.from_dict(tensors, {"uid": numpy.array(uids, dtype=object)})
            if new:
                return utils.compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"]
            return ray_trainer.compute_advantage(data, "grpo").batch["advantages"]
        stock = [advantages(new) for new in (False, True)]
        assert torch.equal(*stock)
        flashpatch.enable("flowrl")
        assert all(torch.equal(advantages(new), stock[0]) for new in (False, True))
        flashpatch.enable("flowrl", reward="raw")
        raw = here.batch()["token_level_rewards"].sum(1, keepdim=True) * here.batch()["response_mask"]
        assert all(torch.equal(advantages(new), raw) for new in (False, True))
        for reward, base in (("raw", raw), ("advantage", stock[0])):
            flashpatch.enable("flowrl", reward=reward, log_z="group")
            chosen = here.options.current()
            wanted = less_log_z({**here.batch(), "advantages": base}, uids, chosen)
            assert not torch.allclose(wanted, base)
            assert all(torch.allclose(advantages(new), wanted, atol=1e-6) for new in (False, True))
        flashpatch.disable("flowrl")
        assert all(torch.equal(advantages(new), stock[0]) for new in (False, True))
        """.replace("TESTS", repr(str(__file__).rpartition("/")[0])),
        tmp_path,
        imported=warm.VERL_VLLM,
        FLASHPATCH="cpu,bf16",
    )


@pytest.mark.verl
def test_an_actor_without_partition_function_has_the_papers_gradient(tmp_path):
    """Real update_actor steps: as log Z is in the advantages, the gradient is the formula's with log Z of 0."""
    import flow_lab

    from flashpatch.verify.probes.flowrl import tiny

    tiny.write_model(tmp_path / "model")
    halves = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
    cases = [{"name": "group", "options": {"log_z": "group"}}]
    cases.append({"name": "micro", "options": {"log_z": "group"}, "overrides": halves})
    flow_lab.run(tmp_path, cases)
    seen, micro = (flow_lab.result(tmp_path, name) for name in ("group", "micro"))
    assert not [name for name in seen["before"] if "proj_z" in name]
    assert "actor/log_z" not in seen["metrics"][0]
    wanted, loss, _ = flow_lab.paper(seen, layers=0)
    assert seen["metrics"][0]["actor/tb_loss"] == pytest.approx(loss, rel=1e-5)
    for found in (seen, micro):
        assert flow_lab.furthest(flow_lab.gradient(found), wanted) < 2e-4
