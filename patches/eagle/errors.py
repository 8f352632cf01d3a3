"""Make the family's errors."""

from __future__ import annotations

from flashpatch.errors import PatchError


def eagle_error(target: str | None, problem: str, advice: str) -> PatchError:
    """Return an error about a part of the family, such as ``"drafter"``, or about one of its settings."""
    return PatchError(problem, patch="eagle", target=target, advice=advice)
