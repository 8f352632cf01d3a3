"""Fields that the records for verl share."""

from __future__ import annotations

from functools import partial

from flashpatch.record import Patch

DriverPatch = partial(
    Patch,
    requires="verl>=0.9",
    scope=frozenset({"driver"}),
    remove_when="verl trains drafters between rollouts and brings them to its replicas.",
)
