"""Read the bandit's part of the family's options, which is the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashpatch.errors import PatchError


def policy_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Policy`, its arms apart, that the options describe.

    Raises:
        PatchError: an entry of ``groups`` or ``table`` that cannot be read.
    """
    return {
        "rule": options["rule"] or None,
        "guard": options["guard"],
        "window": options["window"],
        "seed": options["seed"],
        "epsilon": options["epsilon"],
        "buckets": [_size("groups", text) for text in options["groups"]] or None,
        "table": _table(options["table"]),
    }


def _table(rows: list[str]) -> dict[int, str] | None:
    parts = [row.partition(":") for row in rows]
    return {_size("table", size): arm.strip() for size, _, arm in parts} or None


def _size(option: str, text: Any) -> int:
    if str(text).strip().isdecimal():
        return int(text)
    raise PatchError(
        f"{option} has an entry {text!r}, which does not begin with a batch size.",
        patch="eagle",
        target=option,
        advice='Write groups as ["1", "4", "20", "21"], a table as ["4:8_4_32", "20:8_4_16", "64:disable"].',
    )
