"""Whole jobs of verl's own entry point whose rollouts are SGLang's, audited at each sync."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import verl_job
from sglang_lab import FRAMEWORK, OLD
from verl_job import live, train

pytestmark = [pytest.mark.verl, pytest.mark.sglang, pytest.mark.full]

VICTIM = "model.layers.1.mlp.down_proj.weight"
FAMILY = f"fsdp.{FRAMEWORK}"
AUDIT = f"{FAMILY}.update_weights_from_tensor"


def run(world: Path, folder: Path, names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return train(
        world,
        folder,
        "actor_rollout_ref.rollout.name=sglang",
        FLASHPATCH=names,
        TORCHDYNAMO_DISABLE="1",
        **variables,
    )


def audits(folder: Path) -> dict[str, Any]:
    """What the processes noted about their last sync, by whether they sent it or received it."""
    notes = verl_job.audits(folder)
    assert len(notes) == 2, notes
    return {"received" if "audited" in note else "sent": note for note in notes}


def test_each_sync_is_audited(wide_world, tmp_path):
    """Once before the first step and after each of two; the weights fill several buckets."""
    done = run(wide_world, tmp_path, "cpu,bf16,fsdp")
    assert done.returncode == 0, done.stdout[-8000:]
    calls = [
        {name: patch["calls"] for name, patch in process["patches"].items() if name.startswith(f"{FAMILY}.")}
        for process in live(tmp_path)
        if process["patches"].get(AUDIT, {}).get("calls")
    ]
    assert len(calls) == 1, calls
    assert calls[0].pop(AUDIT) > 2 * 3, "the weights came in a single bucket"
    session = ("begin_weight_update", "runner_end_weight_update", "end_weight_update")
    once = {f"{FAMILY}.scheduler_init": 1}  # where sessions are fp8's
    assert calls[0] == (once if OLD else {f"{FAMILY}.{name}": 3 for name in session})
    notes = audits(tmp_path)
    got, sent = notes["received"], notes["sent"]
    assert (got["sync"], got["audited"], got["failed"], got["not_audited"]) == (3, 3, 0, 0), got
    assert got["tensors"] == sent["tensors"] > 20 and sent["sync"] == 3


def flip(folder: Path) -> dict[str, str]:
    """Variables that flip a bit in the second sync, between verl's bucket and SGLang's client."""
    (folder / "sglang_flip.py").write_text(FLIP.format(victim=VICTIM))
    return {"PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_MODULES": "sglang_flip"}


def test_a_flipped_bit_stops_the_job_and_is_named(wide_world, tmp_path):
    done = run(wide_world, tmp_path, "cpu,bf16,fsdp", **flip(tmp_path))
    assert done.returncode != 0
    assert f"FLIPPED {VICTIM}" in done.stdout, "the fault was not injected"
    text = f"sync 2 is refused: 1 of the weights differ from the trainer's shards: {VICTIM} has other values"
    assert text in done.stdout and AUDIT in done.stdout, done.stdout[-8000:]
    assert "training/global_step:2" not in done.stdout
    assert audits(tmp_path)["received"]["failed"] == 1


FLIP = '''
"""Flips one bit of one weight of the second sync after it was gathered."""
import torch
from verl.workers.rollout.sglang_rollout import sglang_rollout

stock = sglang_rollout.sgl_update_weights
syncs = 0


async def send(engine, params_batch, *args, **kwargs):
    global syncs
    meddled = []
    for name, tensor in params_batch:
        if name == "{victim}":
            syncs += 1
            if syncs == 2:
                tensor = tensor.clone()
                tensor.view(torch.uint8).view(-1)[8] ^= 1
                print("FLIPPED {victim}", flush=True)
        meddled.append((name, tensor))
    return await stock(engine, *args, params_batch=meddled, **kwargs)


sglang_rollout.sgl_update_weights = send
'''
