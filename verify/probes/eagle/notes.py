"""Judge what the patches noted in the ledger; the notes are the same on every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashpatch.verify.probes.eagle.rounds import DRAFTERS


def bandit_adapts(notes: Mapping[str, Any]) -> tuple[bool, str]:
    """Judge whether the bandit ran several arms and learned from their steps; return the verdict and the
    evidence."""
    found = notes.get("eagle_bandit")
    if not isinstance(found, dict):
        return False, f"the ledger has no choices of the bandit: {notes.get('eagle_bandit_off', found)!r}"
    pulls: dict[str, float] = {}
    for name, number in found.items():
        if name.endswith("/pulls") and number:
            arm = name.split("/")[1]
            pulls[arm] = pulls.get(arm, 0) + number
    return len(pulls) > 1 and found["steps"] > 20, f"{found['steps']:.0f} steps, pulls {pulls}"


def drafter_follows(notes: Mapping[str, Any], sent: Sequence[int] = ()) -> tuple[bool, str]:
    """Judge whether acceptance fell with the drafter of noise, which was rolled back, and rose with those
    before and after; return the verdict and the evidence.

    ``sent`` are the versions that the job gave to its updates; empty if it gave none.
    """
    log = notes.get("eagle_drafter", {}).get("log", ())
    updates = [place for place, event in enumerate(log) if event["event"] == "update"]
    if len(updates) != len(DRAFTERS):
        return False, f"the ledger shows {len(updates)} of {len(DRAFTERS)} updates"
    versions = [log[place]["version"] for place in updates]
    if sent and versions != list(sent):
        return False, f"the ledger has updates to versions {versions}, sent were {list(sent)}"
    exact, restored, again = (log[place]["before"] for place in updates)
    judged = log[updates[0] : updates[1]]
    noise = next((event["after"] for event in judged if event["event"] in ("kept", "worse")), 0.0)
    back = [event["version"] for event in judged if event["event"] == "rollback"] == [0]
    good = back and exact > 2 * noise > 0 and restored > 2 * noise and again > 2 * noise
    evidence = (
        f"tokens per step {exact:.2f}, {noise:.2f} with noise, {restored:.2f} rolled back, {again:.2f} after"
    )
    return good, f"{evidence}; rolled back: {back}"
