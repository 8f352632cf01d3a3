"""Make the errors of a transfer: they name the process, the version and what to do."""

from __future__ import annotations

import traceback

from flashpatch.errors import PatchError

ENGINE = "checkpoint engine gloo"
TIMEOUT = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.timeout_seconds"
ADVICE = "No rollout takes a part of this version for a policy; send the whole version again, or end the job."
_LONGEST = 20_000  # characters of a peer's traceback that are passed on


def transfer_error(problem: str, advice: str = ADVICE) -> PatchError:
    """Return an error of this engine."""
    return PatchError(problem, patch=ENGINE, advice=advice)


def silence(what: str, version: str, seconds: float) -> PatchError:
    """Return the error for a process that is alive and did not do something in time."""
    return transfer_error(
        f"{what} in {seconds:g} s ({version}).", f"If it is slow and not stuck, raise {TIMEOUT}."
    )


def as_text(error: BaseException) -> str:
    """Format an exception with its traceback, for other processes."""
    return "".join(traceback.format_exception(error)).rstrip()[-_LONGEST:]
