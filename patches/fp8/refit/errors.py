"""The error that an update of weights raises."""

from __future__ import annotations

from flashpatch.errors import PatchError

PATCH = "fp8.update"
REQUESTS_RUN = "requests are running"
BUSY = (
    f"{REQUESTS_RUN}, so the update is refused",
    "Let them end or abort them first; on vLLM the option in_flight can be abort, recompute or keep.",
)
REPORT = "Report this model; until then update it by restarting the engine."

ASLEEP = (
    "the engine sleeps and the memory of its weights is away",
    'Call wake_up(tags=["weights"]) first (on SGLang resume_memory_occupation).',
)
"""Problem and advice of the error that every write gets until the memory is back."""


def update_error(problem: str, advice: str, model: str | None = None) -> PatchError:
    """Return a `PatchError` of this patch; ``model``: class name of the model whose update failed."""
    return PatchError(problem, patch=PATCH, target=model, advice=advice)
