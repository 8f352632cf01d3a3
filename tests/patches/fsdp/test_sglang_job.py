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
