"""Name what travels beside weights in a sync that may send differences.

A stream is: the opening message, with the version that it leads from (None: everything comes) and to; weights, whole under
their own names or as patches; the closing message, with the name of each weight in order and the fingerprint of what it
must have become. Other messages of FlashPatch's own, such as an audit's, pass at their place.
"""

from __future__ import annotations

OPEN = "__flashpatch_delta_open__"
CLOSE = "__flashpatch_delta_close__"
_PATCH = "__flashpatch_delta_patch__"
_OURS = "__flashpatch_"


def is_message(name: str) -> bool:
    """Whether a tensor is a message of some patch of FlashPatch, so new in each sync."""
    return name.startswith(_OURS)


def patch_name(name: str, width: int, count: int) -> str:
    """Return the name under which a patch of the weight ``name`` travels."""
    return f"{_PATCH}{width}:{count}:{name}"


def of_patch(name: str) -> tuple[str, int, int] | None:
    """Return weight, bytes of a gap and number of values of a patch; None for anything else."""
    if not name.startswith(_PATCH):
        return None
    width, count, weight = name.removeprefix(_PATCH).split(":", 2)
    return weight, int(width), int(count)
