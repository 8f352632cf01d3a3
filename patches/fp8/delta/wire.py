"""Name what travels beside weights in a sync that may send differences.

A stream is: the opening message, with the version that it leads from (None: everything comes) and to; weights, whole under
their own names or as patches; the closing message, with the name of each weight in order and the fingerprint of what it
must have become. Other messages of FlashPatch's own, such as an audit's, pass at their place."""

from __future__ import annotations

from typing import NamedTuple

OPEN = "__flashpatch_delta_open__"
CLOSE = "__flashpatch_delta_close__"
_PATCH = "__flashpatch_delta_patch__"
_OURS = "__flashpatch_"


def is_message(name: str) -> bool:
    """Whether a tensor is a message of some patch of FlashPatch, so new in each sync."""
    return name.startswith(_OURS)


class Patched(NamedTuple):
    """Describe a patch: of which weight, bytes of a gap, number of values, and the dtype to which the weight is cast before,
    if it is another, such as ``bfloat16``."""

    weight: str
    width: int
    count: int
    dtype: str

    def name(self) -> str:
        """Return the name under which the patch travels."""
        return f"{_PATCH}{self.width}:{self.count}:{self.dtype}:{self.weight}"


def of_patch(name: str) -> Patched | None:
    """Return what travels under a name; None if it is no patch."""
    if not name.startswith(_PATCH):
        return None
    width, count, dtype, weight = name.removeprefix(_PATCH).split(":", 3)
    return Patched(weight, int(width), int(count), dtype)
