"""The loss on random numbers, against the paper's in plain floating-point numbers."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.flowrl.objective import balance
from flashpatch.verify.probes.flowrl import paper

PLAIN = dict(beta=15.0, length="mean", weight="clip", low=0.2, high=0.2, cap=None)


def padded(rows, dtype=torch.float64):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[99.0] * (width - len(row))] for row in rows], dtype=dtype)


logps = st.lists(st.floats(-3, -0.01), min_size=1, max_size=6)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(logps, st.integers(0, 10**6), st.floats(-2, 2), st.floats(-5, 5)), min_size=1, max_size=4
    ),
    st.sampled_from(["clip", "raw", "none"]),
    st.sampled_from(["mean", "sum"]),
    st.floats(0.1, 20),
)
def test_it_is_the_papers(drawn, weight, length, beta):
    rows = []
    for logp, seed, reward, log_z in drawn:
        noise = torch.randn(2, len(logp), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        old, ref = (torch.tensor(logp, dtype=torch.float64) + 0.1 * noise).tolist()
        rows.append((logp, old, ref, reward, log_z))
    mask = torch.tensor([[at < len(row[0]) for at in range(max(len(r[0]) for r in rows))] for row in rows])
    got = balance(
        torch.tensor([row[4] for row in rows], dtype=torch.float64),
        *(padded([row[at] for row in rows]) for at in range(3)),
        padded([[row[3]] * len(row[0]) for row in rows]),
        mask,
        **{**PLAIN, "weight": weight, "length": length, "beta": beta},
    )
    wanted = [
        paper.response_loss(z, logp, old, ref, reward, beta=beta, epsilon=0.2, weight=weight, length=length)
        for logp, old, ref, reward, z in rows
    ]
    assert got.loss.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def one(log_prob, old, **changes):
    log_prob = torch.tensor([log_prob], requires_grad=True)
    ones = torch.ones_like(log_prob)
    correction = changes.pop("correction", None)
    mask = changes.pop("mask", ones.bool())
    return log_prob, balance(
        torch.zeros(1),
        log_prob,
        torch.tensor([old]),
        -ones,
        0.5 * ones,
        mask,
        **{**PLAIN, **changes},
        correction=correction,
    )


def test_a_long_responses_ratio_does_not_overflow():
    _, got = one([0.0] * 200, [-5.0] * 200)
    assert got.weight.item() == pytest.approx(1.2) and got.clipped.item() == 1
    _, got = one([0.0] * 200, [-5.0] * 200, weight="raw", cap=10.0)
    assert got.weight.item() == pytest.approx(10.0) and got.clipped.item() == 1
    _, got = one([0.0] * 200, [-5.0] * 200, weight="raw")
    assert got.weight.item() == float("inf")  # as published; verl then skips the step


def test_masked_tokens_and_responses_without_tokens_weigh_nothing():
    mask = torch.tensor([[True, False]])
    log_prob, got = one([-1.0, float("nan")], [-1.0, float("nan")], mask=mask)
    _, short = one([-1.0], [-1.0])
    assert got.loss.item() == pytest.approx(short.loss.item())
    got.loss.sum().backward()
    assert log_prob.grad[0, 1] == 0
    _, got = one([-1.0, -1.0], [-1.0, -1.0], mask=torch.zeros(1, 2, dtype=torch.bool))
    assert got.loss.item() == 0 and got.weight.item() == 0


def test_rollout_correction_is_a_responses_mean():
    _, plain = one([-1.0, -2.0], [-1.0, -2.0])
    _, got = one([-1.0, -2.0], [-1.0, -2.0], correction=torch.tensor([[0.5, 1.5]]) / 2)
    assert got.loss.item() == pytest.approx(plain.loss.item() / 2)


def test_low_precision_is_summed_wide():
    rows = torch.full((1, 4096), -0.01, dtype=torch.bfloat16)
    every = torch.ones_like(rows).bool()
    got = balance(torch.zeros(1), rows, rows, rows * 0, rows * 0, every, **{**PLAIN, "length": "sum"})
    assert got.residual.dtype == torch.float32
    assert got.residual.item() == pytest.approx(4096 * rows[0, 0].item(), rel=1e-5)


@pytest.mark.verl
@pytest.mark.parametrize("tokens", [0, 900])
def test_what_verl_logs_is_wide_and_zero_where_nothing_counts(monkeypatch, tokens):
    """A mean over tokens was bf16; without tokens, losses were nan."""
    from tensordict import TensorDict
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    from flashpatch.patches.flowrl import loss

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    chosen = {name: option.default for name, option in loss.options.OPTIONS.items()}
    monkeypatch.setattr(loss.options, "current", lambda: SimpleNamespace(**chosen))
    monkeypatch.setattr(loss.engine, "record_call", lambda patch: None)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "flowrl", loss.trajectory_balance)
    one = torch.linspace(0.1, 3, 900).bfloat16()
    mask = (torch.arange(900) < tokens).long()
    fields = dict(prompts=torch.ones(2).long(), responses=mask, response_mask=mask, ref_log_prob=-one)
    fields |= dict(old_log_probs=-one, advantages=one)
    data = TensorDict({name: jagged([value]) for name, value in fields.items()}, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=1)
    kl = dict(use_kl_loss=True, kl_loss_type="kl", kl_loss_coef=0.0, loss_agg_mode="token-mean")
    clip = dict(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, loss_scale_factor=None)
    config = SimpleNamespace(policy_loss={"loss_mode": "flowrl"}, global_batch_info={}, **kl, **clip)
    logs = jagged([torch.cat([one[:1], -one, one[:1]])]).requires_grad_()
    output = {"log_probs": logs, loss.LOG_Z: torch.zeros(1, dtype=torch.bfloat16)}
    total, metrics = loss.ppo_loss(ppo_loss, config, output, data)
    found = {name: value.aggregate() for name, value in metrics.items() if hasattr(value, "aggregate")}
    total.backward()
    ends = [found.pop(f"actor/tb_residual_{end}") for end in ("min", "max")]
    assert torch.isfinite(torch.tensor([float(total), *found.values()])).all(), found
    assert ends == [float("inf"), -float("inf")] or (tokens and ends[0] == ends[1] != 0)
    logged = one.double().mean().item() * bool(tokens)
    wanted = {"actor/logpf": -logged, "actor/logp_ref": -logged, "actor/log_reward": logged}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
