"""Name the keys in Ray's key-value store, and pack what is stored under them.

A *place* is one run directory on one node. Keys, in the namespace `NAMESPACE`:

- ``v3/runs/<run>``: when a node last published for the run;
- ``v3/places/<run>/<place>``: what is in the place, see `flashpatch.ledger.nodes.published`.

Every value is JSON, compressed by zlib."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

NAMESPACE = b"flashpatch"

MOST_BYTES = 64 << 20
"""Bytes of all rows of one place; rows beyond are left out, and counted."""

FILE = re.compile(
    r"(?P<kind>row|expect|idle|events|samples)-(?P<host>.*)-(?P<pid>\d+)-(?P<start>[A-Za-z0-9._]*?)(?:\.old)?\.jsonl?"
)
"""Name of a file of a process in a run directory."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def place(node: str, host: str, folder: str) -> str:
    """Return the name of a run directory on a node: 12 hexadecimal digits."""
    import hashlib  # takes longer to import than the rest, and who reads a ledger needs it not

    return hashlib.sha256("\0".join((node, host, folder)).encode()).hexdigest()[:12]


def of_run(run: str = "") -> str:
    return f"v3/runs/{run}"


def of_place(run: str, place: str = "") -> str:
    return f"v3/places/{run}/{place}"


def is_plain(text: str) -> bool:
    """Whether a text may be a file's name as it is: what comes from the store is not trusted to be."""
    return bool(_PLAIN.fullmatch(text)) and not text.startswith(".")


def packed(value: Any) -> bytes:
    """Return a JSON value, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpacked(data: bytes, largest: int = 3 * MOST_BYTES) -> Any:
    """Return the value of `packed`. Raises ValueError if it is not one, or has more than ``largest`` bytes."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, largest)
        if stream.unconsumed_tail or not stream.eof:
            raise ValueError(f"more than {largest} bytes, or cut short")
        return json.loads(content)
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from None
