"""Record each sample's rollout precision in a mixed fleet."""

from __future__ import annotations

from typing import Any

from flashpatch import engine
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.verl.correction.mismatch import KEY


def note(output: Any, replica: int) -> None:
    """Add the precision of a replica, in a fleet of several precisions, to verl's ``TokenOutput``."""
    options = engine.options("fp8")
    if len(options["fleet"]) > 1:
        entries = fleet.entries(options["precision"], options["scheme"], options["fleet"])
        output.extra_fields[KEY] = fleet.assigned(entries, replica).precision
