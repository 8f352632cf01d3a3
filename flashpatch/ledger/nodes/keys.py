"""Name the keys in Ray's key-value store, and pack what is stored under them.

A *place* is one run directory on one node. Keys, in the namespace `NAMESPACE`:

- ``v2/runs/<run>``: when a node last published for the run;
- ``v2/rows/<run>/<place>``: whose it is, which of its processes are alive, and its row files, name to text;
- ``v2/events/<run>/<place>``: the ends of its files of events, name to text.

Every value is JSON, compressed by zlib.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

NAMESPACE = b"flashpatch"

MOST_BYTES = 64 << 20
"""Bytes of all rows of one place; rows beyond are left out, and counted."""

FILE = re.compile(
    r"(?P<kind>row|expect|events|samples)-(?P<host>.*)-(?P<pid>\d+)-(?P<start>[A-Za-z0-9._]*?)(?:\.old)?\.jsonl?"
)
"""Name of a file of a process in a run directory."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def place(node: str, host: str, folder: str) -> str:
    """Return the name of a run directory on a node: 12 hexadecimal digits."""
    import hashlib  # takes longer to import than the rest, and who reads a ledger needs it not

    return hashlib.sha256("\0".join((node, host, folder)).encode()).hexdigest()[:12]


def run(run_id: str = "") -> str:
    return f"v2/runs/{run_id}"


def rows(run_id: str, place: str = "") -> str:
    return f"v2/rows/{run_id}/{place}"


def events(run_id: str, place: str = "") -> str:
    return f"v2/events/{run_id}/{place}"


def is_plain(text: str) -> bool:
    """Whether a text may be a file's name as it is: what comes from the store is not trusted to be."""
    return bool(_PLAIN.fullmatch(text)) and not text.startswith(".")


def packed(value: Any) -> bytes:
    """Return a JSON value, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpacked(data: bytes, largest: int = 2 * MOST_BYTES) -> Any:
    """Return the value of `packed`.

    Raises:
        ValueError: it is not one, or has more than ``largest`` bytes.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, largest)
        if stream.unconsumed_tail or not stream.eof:
            raise ValueError(f"more than {largest} bytes, or cut short")
        return json.loads(content)
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from None
