"""Remove old runs from Ray's key-value store: by age, and by number beyond the newest.

The store is memory of Ray's head node and lives as long as the cluster, so fewer runs are kept than on disk. A run that
was published to within the last ten minutes stays.
"""

from __future__ import annotations

import time

from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.ray_store import Store

MOST_RUNS = 20
_DAY = 86400.0
_RECENT = 600.0


def prune(store: Store, present: str, days: float, runs: int) -> list[str]:
    """Remove runs last published to more than ``days`` ago (0: no limit), and all but the newest ``runs`` (at most, and
    for 0, `MOST_RUNS`), of which ``present`` is one and stays; return the ids of those removed. Raises StoreError."""
    limit, now = min(runs or MOST_RUNS, MOST_RUNS), time.time()
    others = [(written, run) for run, written in published(store).items() if run != present]
    removed = []
    for rank, (written, run) in enumerate(sorted(others, reverse=True), start=2):
        age = now - written
        if age > _RECENT and (rank > limit or (days and age > days * _DAY)):
            for prefix in (keys.rows(run), keys.events(run)):
                store.delete(prefix, prefix=True)
            store.delete(keys.run(run))
            removed.append(run)
    return removed


def published(store: Store) -> dict[str, float]:
    """Return the runs in the store, each with when a node last published for it, seconds since 1970. Raises StoreError."""
    found = {}
    for key, value in store.get(store.keys(keys.run())).items():
        try:
            found[key.removeprefix(keys.run())] = float(keys.unpacked(value)["written"])
        except (ValueError, KeyError, TypeError):
            continue  # not ours, or of another format
    return found
