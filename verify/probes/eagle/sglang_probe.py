"""Probe family eagle on SGLang: open an engine with an exact drafter, send it noise, and see that rolled back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle import sglang_job

JOB = sglang_job.__name__
ENVIRONMENT: dict[str, str] = {}
DUE = (
    "verify",
    "forward_prefill_batch",
    "release_kv_cache",
    "init_cuda_graphs",
    "activate_step_by_batch",
    "on_verify_complete_cpu",
    "weight_updater_manager_post_init",
    "begin_weight_update",
    "end_weight_update",
)
"""Patches that the job must have called."""


def models(workdir: Path) -> None:
    """Write the drafters."""
    from flashpatch.verify.probes.eagle import tiny

    for seed, name in enumerate(("exact", "noise")):
        tiny.drafter(workdir / name, exact=name == "exact", seed=seed, engine="sglang")


def switched(notes: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the bandit chose and learned, and the evidence."""
    noted = notes.get("eagle_bandit")
    if not isinstance(noted, dict):
        return False, f"the ledger holds no note of it: {noted!r}"
    pulls = {name.split("/")[1]: n for name, n in noted.items() if name.endswith("/pulls") and n}
    return len(pulls) > 1 and noted["steps"] > 20, f"{noted['steps']:.0f} steps, pulls {pulls}"


def synced(notes: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the acceptance length followed the drafters and noise was rolled back, and the evidence."""
    noted, version = notes.get("eagle_sync", {}), notes.get("eagle_drafter")
    before, after = noted.get("before", 0.0), noted.get("after", 0.0)
    again = max(seen["lengths"].get("after", [0.0]))
    back = noted.get("verdict") == "taken back" and version == 0
    good = back and before > 2 * after > 0 and again > 2 * after
    return (
        good,
        f"tokens per step {before:.2f}, {after:.2f} with noise, {again:.2f} after; rolled back: {back}",
    )
