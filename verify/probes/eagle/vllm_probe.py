"""Probe family eagle on vLLM: open an engine with an exact drafter, send it noise, then an exact one again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle import vllm_job

JOB = vllm_job.__name__
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
DUE = (
    "sample_tokens",
    "execute_model",
    "free_request",
    "schedule",
    "create_speculative_config",
    "scheduler_init",
    "update_from_output",
    "worker",
    "collective_rpc",
)
"""Patches that the job must have called."""


def models(workdir: Path) -> None:
    """Write the drafters."""
    from flashpatch.verify.probes.eagle import tiny

    for seed, name in enumerate(vllm_job.ROUNDS):
        tiny.drafter(workdir / name, exact=name != "noise", seed=seed)


def switched(notes: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the bandit chose and learned, and the evidence."""
    noted = notes.get("eagle_speculation")
    if not isinstance(noted, dict):
        return False, f"the ledger holds no note of it: {noted!r}"
    pulls = {name.split("/")[1]: n for name, n in noted.items() if name.endswith("/pulls") and n}
    good = len(pulls) > 1 and noted["counted"] > 20
    return good, f"{noted['steps']} steps, {noted['counted']} counted, pulls {pulls}"


def synced(notes: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the acceptance length followed the drafters and noise was rolled back, and the evidence."""
    log = notes.get("eagle_drafter", {}).get("log", ())
    updates = [event for event in log if event["event"] == "update"]
    if len(updates) != len(vllm_job.ROUNDS):
        return False, f"the ledger shows {len(updates)} of {len(vllm_job.ROUNDS)} updates"
    judged = {event["version"]: event["after"] for event in log if event["event"] in ("kept", "worse")}
    exact, noise, again = updates[0]["before"], judged.get(1, 0.0), judged.get(2, updates[2]["before"])
    back = [event["version"] for event in log if event["event"] == "rollback"][:1] == [0]
    good = back and exact > 2 * noise > 0 and again > 2 * noise
    return (
        good,
        f"tokens per step {exact:.2f}, {noise:.2f} with noise, {again:.2f} after; rolled back: {back}",
    )
