"""Whole jobs of verl's own entry point whose rollouts are SGLang's, audited at each sync."""

from pathlib import Path
from typing import Any

import pytest
import verl_job
from sglang_lab import FRAMEWORK, OLD
from verl_job import live, trained

pytestmark = [pytest.mark.verl, pytest.mark.sglang, pytest.mark.full]

FAMILY = f"fsdp.{FRAMEWORK}"
AUDIT = f"{FAMILY}.update_weights_from_tensor"


def audits(folder: Path) -> dict[str, Any]:
    """What the processes noted about their last sync, by whether they sent it or received it."""
    notes = verl_job.audits(folder)
    assert len(notes) == 2, notes
    return {"received" if "audited" in note else "sent": note for note in notes}


def test_each_sync_is_audited(wide_world, tmp_path):
    """Once before the first step and after each of two; the weights fill several buckets."""
    on = dict(FLASHPATCH="cpu,bf16,fsdp", TORCHDYNAMO_DISABLE="1")
    trained(wide_world, tmp_path, "actor_rollout_ref.rollout.name=sglang", **on)
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
