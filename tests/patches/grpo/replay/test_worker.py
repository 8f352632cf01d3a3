"""verl's own actor worker with recorded experts: one result under every way in which it holds tokens and weights."""

import flow_lab
import pytest
import torch
from flow_lab import ACTOR, FSDP1, FSDP2, PACKED, RECOMPUTED

pytestmark = pytest.mark.verl


def _run(folder, ranks, **cases):
    plan = [dict(name=name, settings=settings, record=name != "stock") for name, settings in cases.items()]
    return flow_lab.run_plan("replay_ranks.py", folder, ranks, plan, FLASHPATCH="cpu,bf16")


def _same(one, other):
    assert one["step"].keys() == other["step"].keys()
    for name, step in one["step"].items():
        assert torch.allclose(step, other["step"][name], rtol=1e-3, atol=1e-5), name


def test_one_rank_packed_or_padded_recomputed_or_not(tmp_path):
    found = _run(tmp_path, 1, stock=[FSDP1], padded=[FSDP1], packed=[FSDP2, PACKED, RECOMPUTED])
    wanted = torch.load(tmp_path / "wanted.pt")
    assert (found["stock"]["logs"] - wanted).abs().max() > 0.1
    for name in ("padded", "packed"):
        assert (found[name]["logs"] - wanted).abs().max() < 1e-4, name
    _same(found["packed"], found["padded"])
    routers = {name: step for name, step in found["padded"]["step"].items() if "mlp.gate.weight" in name}
    assert len(routers) == 2 and all(step.abs().max() > 1e-6 for step in routers.values())


@pytest.mark.full
def test_two_ranks_that_share_each_row_or_the_weights(tmp_path):
    (alone,) = _run(tmp_path, 1, alone=[FSDP1]).values()
    shared = [FSDP2, PACKED, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    halves = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    ]
    found = _run(tmp_path, 2, shared=[*shared, RECOMPUTED], sharded=[FSDP1, PACKED, *halves])
    assert (found["shared"]["logs"] - torch.load(tmp_path / "wanted.pt")).abs().max() < 1e-4
    _same(found["shared"], alone)
    _same(found["sharded"], alone)
