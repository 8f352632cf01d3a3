"""Judge what all ranks report of their policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpatch import engine

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.policy import Policy


def without_target(reports: list[list[Policy]]) -> str:
    """Return the ranks that know no target, as a sentence; empty if all do."""
    ranks = [
        str(rank)
        for rank, policies in enumerate(reports)
        if not any(policy.role == "target" for policy in policies)
    ]
    if not ranks:
        return ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
    return f"FlashPatch does not follow the weights of {which}, so an update there would go unnoticed"


def agreed(reports: list[list[Policy]], role: str) -> tuple[int, str]:
    """Return the version that all ranks hold of one model, 0 if none has it, and why it may not be used."""
    held = [
        (rank, policy) for rank, policies in enumerate(reports) for policy in policies if policy.role == role
    ]
    broken = [
        f"rank {rank} cannot serve: {policy.why_refused()}" for rank, policy in held if not _serves(policy)
    ]
    versions = sorted({policy.version for _, policy in held})
    if broken:
        return max(versions), "; ".join(broken)
    if len(versions) > 1:
        return max(versions), f"ranks hold different versions of the {role}, {versions}"
    return max(versions, default=0), ""


def holds(reports: list[list[Policy]]) -> dict | None:
    """Return what the numbers of LoRA adapters hold, the same on all ranks; None if adapters are not followed."""
    return next((one.holds for policies in reports for one in policies if one.role == "lora"), None)


def _serves(policy: Policy) -> bool:
    atomic = engine.options("fp8")["atomic"]
    return policy.state == "ready" or (policy.state == "open" and atomic == "model")
