"""Lower verl's numbers of helper processes on a machine with few cores, if the configuration gives none."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from flashpatch.patches._shared import verl_config

DEFAULT = 8
"""verl's default for each of `HELPERS`, whatever the machine has."""

HELPERS = (
    "actor_rollout_ref.rollout.agent.num_workers",
    "reward.num_workers",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)
DASHBOARD = "ray_kwargs.ray_init.include_dashboard"


def adaptations(get: Any, starts_ray: bool) -> Iterator[tuple[str, Any]]:
    """Yield settings with their value for this machine: one helper per two cores, no dashboard.

    Helpers of one kind share out a batch and do the same to each part, so that their number changes no
    result. ``get(path, default)`` reads the configuration.
    """
    fitting = max(1, cores() // 2)
    if fitting >= DEFAULT:
        return
    given = overridden()
    for path in HELPERS if given is not None else ():
        if get(path) == DEFAULT and path not in given:
            yield path, fitting
    if starts_ray and get(DASHBOARD) is None:
        yield DASHBOARD, False


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def overridden() -> Collection[str] | None:
    """Paths of the settings that were given on the command line; None if Hydra did not read one."""
    return verl_config.overrides() if verl_config.is_hydra_application() else None
