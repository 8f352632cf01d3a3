"""Whole jobs of verl's own entry point on two ranks and two replicas, audited at each sync."""

from pathlib import Path
from typing import Any

import pytest
from verl_job import audits, live, train, trained

pytestmark = pytest.mark.verl

VICTIM = "model.layers.1.mlp.down_proj.weight"


def strategy(name: str) -> list[str]:
    return [f"actor_rollout_ref.actor.strategy={name}", f"actor_rollout_ref.ref.strategy={name}"]


def test_two_fsdp2_ranks_and_two_replicas_are_audited_at_each_sync(fp8_job):
    check_audits(fp8_job.processes, fp8_job.folder)


@pytest.mark.full
def test_two_fsdp_ranks_and_two_replicas_are_audited_at_each_sync(wide_world, two_ranks, tmp_path):
    trained(wide_world, tmp_path, *two_ranks, *strategy("fsdp"), FLASHPATCH="cpu,fp8,fsdp")
    check_audits(live(tmp_path), tmp_path)


def check_audits(processes: list[dict[str, Any]], folder: Path) -> None:
    """Check that both receivers have audited each sync of a job of two steps, and found nothing."""
    receivers = [p for p in processes if p["patches"].get("fsdp.verl_vllm.receive_weights", {}).get("calls")]
    senders = [p for p in processes if p["patches"].get("fsdp.verl.get_per_tensor_param", {}).get("calls")]
    assert len(receivers) == len(senders) == 2
    # once before the first step and after each of two
    assert [p["patches"]["fsdp.verl_vllm.receive_weights"]["calls"] for p in receivers] == [3, 3]
    assert [p["patches"]["fsdp.verl.get_per_tensor_param"]["calls"] for p in senders] == [3, 3]
    notes = audits(folder)
    assert len(notes) == 4, notes
    arrived = [note for note in notes if "audited" in note]
    assert len(arrived) == 2
    for note in arrived:
        assert (note["sync"], note["audited"], note["failed"], note["not_audited"]) == (3, 3, 0, 0), note
        assert note["tensors"] > 20


@pytest.mark.full
def test_a_flipped_bit_stops_the_job_and_is_named(wide_world, two_ranks, tmp_path):
    """A bit flips in the shared memory of the second sync, between the trainer and one of two replicas."""
    (tmp_path / "fsdp_flip.py").write_text(FLIP.format(victim=VICTIM))
    on = dict(FLASHPATCH="cpu,fp8,fsdp", PYTHONPATH=str(tmp_path), VERL_USE_EXTERNAL_MODULES="fsdp_flip")
    done = train(wide_world, tmp_path, *two_ranks, *strategy("fsdp2"), **on)
    assert done.returncode != 0
    assert f"{VICTIM} has other values than the trainer's shards" in done.stdout, done.stdout[-8000:]
    assert "fsdp.verl_vllm.receive_weights" in done.stdout


FLIP = '''
"""Flips one bit of one weight of the second sync on rank 0, after it was gathered."""
import os
import torch
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
stock = transfer.BucketedWeightSender.async_send_weights
syncs = 0

async def send(self, weights):
    global syncs
    syncs += 1
    def meddled():
        for name, tensor in weights:
            if name == "{victim}" and syncs == 2 and os.environ.get("RANK") == "0":
                tensor = tensor.clone()
                tensor.view(torch.uint8).view(-1)[8] ^= 1
            yield name, tensor
    return await stock(self, meddled())

transfer.BucketedWeightSender.async_send_weights = send
'''
