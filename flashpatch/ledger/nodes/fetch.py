"""Copy what the nodes of a run published in Ray's key-value store into the run's directory here.

It stays there, see `flashpatch.ledger.nodes.node`, when a node or the whole cluster is gone.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

from flashpatch.ledger import files
from flashpatch.ledger.nodes import keys, node
from flashpatch.ledger.nodes.ray_store import Store


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
    prefix = keys.of_place(run)
    places = {key: place for key in store.keys(prefix) if keys.is_plain(place := key.removeprefix(prefix))}
    if {*places.values()} <= {here}:
        return len(places)
    try:
        kept = node.kept(folder)
    except (OSError, ValueError):
        kept = {}
    nodes = store.nodes()
    for key, published in store.get(places).items():
        told = nodes.get(node.id_of(published), {})
        kept[places[key]] = {
            "state": node.ALIVE if told.get("alive") else node.DEAD if told else node.UNKNOWN,
            "name": told.get("name", ""),
            "address": told.get("address", ""),
            "fetched": time.time(),
            "published": base64.b64encode(published).decode(),
        }
    files.write_bytes(folder / node.FOLDER / node.FILE, json.dumps(kept).encode())
    return len(places)
