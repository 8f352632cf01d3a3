"""Copy what the nodes of a run published in Ray's key-value store into the run's directory here.

It stays there, see `flashpatch.ledger.nodes.node`, when a node or the whole cluster is gone.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

from flashpatch.ledger import files
from flashpatch.ledger.nodes import keys, node, old_keys
from flashpatch.ledger.nodes.ray_store import Store


def run_ids(store: Store) -> list[str]:
    """Return the runs in the store, the one published to last at the end. Raises StoreError."""
    found = old_keys.published(store)
    return sorted((run for run in found if keys.is_plain(run)), key=lambda run: found[run])


def fetch(store: Store, run: str, folder: Path, here: str = "") -> int:
    """Bring the directory of a run up to date.

    Args:
        store: where from.
        run: id of the run.
        folder: its directory here; it is made if it is missing.
        here: the place that this directory is; nothing is copied if there is no other.

    Returns:
        The number of places that published.

    Raises:
        StoreError: Ray does not answer.
        OSError: the directory cannot be written.
    """
    found = [key.removeprefix(keys.rows(run)) for key in store.keys(keys.rows(run))]
    found = [place for place in found if keys.is_plain(place)]
    if {*found} <= {here}:
        return len(found)
    values = store.get([name(run, place) for place in found for name in (keys.rows, keys.events)])
    states = {id: node.ALIVE if told["alive"] else node.DEAD for id, told in store.nodes().items()}
    try:
        kept = node.kept(folder)
    except (OSError, ValueError):
        kept = {}
    for place in found:
        rows, events = (values.get(name(run, place), b"") for name in (keys.rows, keys.events))
        kept[place] = {
            "state": states.get(_node_of(rows), node.UNKNOWN),
            "fetched": time.time(),
            "rows": base64.b64encode(rows).decode(),
            "events": base64.b64encode(events).decode(),
        }
    files.write_bytes(folder / node.FOLDER / node.FILE, json.dumps(kept).encode())
    return len(found)


def _node_of(rows: bytes) -> Any:
    try:
        return str(keys.unpacked(rows)["node"])
    except (ValueError, KeyError, TypeError):  # who reads it says so
        return None
