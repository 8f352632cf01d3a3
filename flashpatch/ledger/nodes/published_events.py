"""Publish one file of events in chunks, of which only the last is written again as the file grows."""

from __future__ import annotations

import os
import zlib
from typing import Any

from flashpatch.ledger import events, schema
from flashpatch.ledger.nodes import keys
from flashpatch.ledger.nodes.ray_store import Store


class PublishedEvents:
    """Follow one file. A file that was shortened is another one, with another inode: its generation.

    Attributes:
        entry: for the place's index: ``generation``, ``first`` (number of the oldest chunk stored), ``size`` (bytes of
            the file), ``gone`` (what lies before the first chunk, as in `flashpatch.ledger.events`); None before the
            first chunk.
    """

    def __init__(self, run: str, place: str, path: str) -> None:
        self._run = run
        self._place = place
        self._path = path
        self._name = os.path.basename(path)
        self.entry: dict[str, Any] | None = None

    def publish(self, store: Store, found: os.stat_result) -> bool:
        """Store what is new; return whether anything was. Raises StoreError, and OSError for the file."""
        before = self.entry
        same = before is not None and before["generation"] == found.st_ino and found.st_size >= before["size"]
        if before is not None and same and found.st_size == before["size"]:
            return False
        number = max(0, -(-found.st_size // keys.CHUNK) - keys.CHUNKS)
        sent = before["size"] // keys.CHUNK if before is not None and same else 0
        with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            gone = before["gone"] if before is not None and same else {}
            if number and (not same or before is None or number > before["first"]):
                gone = _before(file, number * keys.CHUNK)
            size = self._store_chunks(store, file, found, max(number, sent))
        entry = {"generation": found.st_ino, "first": number, "size": size, "gone": gone}
        if before is not None and same:
            for old in range(before["first"], number):
                store.delete(self._key(before["generation"], old))
        self.entry = entry
        return True

    def forget_older(self, store: Store) -> None:
        """Delete the chunks of earlier generations; call it when the index names this one. Raises StoreError."""
        assert self.entry is not None
        keep = keys.generation_prefix(self._run, self._place, self._name, self.entry["generation"])
        everything = keys.events(self._run, f"{self._place}/{self._name}/")
        for key in store.keys(everything):
            if not key.startswith(keep):
                store.delete(key)

    def _store_chunks(self, store: Store, file: Any, found: os.stat_result, first: int) -> int:
        """Store the chunks from one on; return the bytes that the file had, which may be more than was found."""
        file.seek(first * keys.CHUNK)
        size, number = first * keys.CHUNK, first
        while size < found.st_size:
            data = file.read(keys.CHUNK)
            if not data:
                break
            store.put(self._key(found.st_ino, number), zlib.compress(data, 1))
            size, number = size + len(data), number + 1
        return size

    def _key(self, generation: int, number: int) -> str:
        return keys.chunk(self._run, self._place, self._name, generation, number)


def _before(file: Any, end: int) -> dict[str, Any]:
    """Count the events whose lines begin before a byte of a file."""
    gone: dict[str, Any] = {"events": 0, "samples": 0, "by": {}}
    file.seek(0)
    while file.tell() < end:
        event = schema.event(file.readline())
        if event is not None and event["event"] == events.DROPPED:
            gone.update({kind: event[kind] for kind in gone if kind in event})
        elif event is not None:
            kind = events.kind_of(event)
            gone["events"] += 1
            gone["by"][kind] = gone["by"].get(kind, 0) + 1
    return gone
