"""Refuse invalid arguments by name."""

from __future__ import annotations

from typing import NoReturn

from flashpatch.errors import PatchError


def refuse(part: str, setting: str, problem: str, advice: str) -> NoReturn:
    """Raise for an invalid argument or option.

    Args:
        part: which part of the family, such as ``"logprobs"``.
        setting: name of the argument or option.
        problem: what is wrong with it, with its value.
        advice: what to give instead.

    Raises:
        PatchError: always.
    """
    raise PatchError(problem, patch=f"grpo.{part}", target=setting, advice=advice)
