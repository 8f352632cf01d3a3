"""verl's own actor worker with kept ids: values and gradients of a softmax over them, however it holds tokens and weights."""

import flow_lab
import pytest
import torch
from flow_lab import ACTOR, FSDP1, FSDP2, PACKED, RECOMPUTED

pytestmark = pytest.mark.verl


def _run(folder, ranks, **cases):
    plan = [dict(name=name, settings=settings, kept=name != "stock") for name, settings in cases.items()]
    names, config = "cpu,bf16", "[fp8]\nsupport = 8\n"
    found = flow_lab.run_plan("support_ranks.py", folder, ranks, plan, FLASHPATCH=names, config=config)
    return found, torch.load(folder / "wanted.pt")


def _agrees(found, wanted):
    assert (found["logs"] - wanted["logs"]).abs().max() < 1e-4
    assert len(wanted["step"]) > 20
    for name, step in wanted["step"].items():
        assert torch.allclose(found["step"][name], step, rtol=1e-3, atol=1e-5), name


def test_one_rank_packed_or_padded_recomputed_or_not(tmp_path):
    found, wanted = _run(tmp_path, 1, stock=[FSDP1], padded=[FSDP1], packed=[FSDP2, PACKED, RECOMPUTED])
    assert (found["stock"]["logs"] - wanted["logs"]).abs().max() > 0.1
    away = max((found["stock"]["step"][name] - step).abs().max() for name, step in wanted["step"].items())
    assert away > 1e-2
    _agrees(found["padded"], wanted)
    _agrees(found["packed"], wanted)


@pytest.mark.full
def test_two_ranks_that_share_each_row_or_the_weights(tmp_path):
    shared = [FSDP2, PACKED, RECOMPUTED, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    halves = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    found, wanted = _run(tmp_path, 2, shared=shared, sharded=[FSDP1, PACKED, *halves])
    _agrees(found["shared"], wanted)
    for name, step in wanted["step"].items():
        assert torch.allclose(found["sharded"]["step"][name], step, rtol=1e-3, atol=1e-5), name
