"""Read the bandit's part of the family's options, which is the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def policy_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Policy`, its arms apart, that the options describe."""
    return {"rule": options["rule"] or None, "guard": options["guard"]}
