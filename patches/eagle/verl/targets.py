"""What the records of this folder have in common."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = dict(
    requires="verl>=0.9",
    scope=frozenset({"driver"}),
    tested=("0.9.1",),
    remove_when="verl trains drafters between rollouts and brings them to its replicas.",
)
