"""Name the keys in Ray's key-value store, and pack what is stored under them.

A *place* is one run directory on one node. Keys, in the namespace `NAMESPACE`:

- ``v1/runs/<run>``: when a node last published for the run;
- ``v1/index/<run>/<place>``: what the place holds, and which of its processes are alive;
- ``v1/rows/<run>/<place>``: its row files, name to text;
- ``v1/events/<run>/<place>/<file>/<generation>/<number>``: `CHUNK` bytes of a file of events, the last chunk fewer.

Every value is JSON or bytes, compressed by zlib.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

NAMESPACE = b"flashpatch"
FORMAT = 1

CHUNK = 64 << 10
"""Bytes of a file of events under one key."""

CHUNKS = 16
"""Chunks of one file that are stored: the newest."""

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


def runs() -> str:
    return "v1/runs/"


def run(run_id: str) -> str:
    return f"v1/runs/{run_id}"


def index(run_id: str, place: str = "") -> str:
    return f"v1/index/{run_id}/{place}"


def rows(run_id: str, place: str = "") -> str:
    return f"v1/rows/{run_id}/{place}"


def events(run_id: str, place: str = "") -> str:
    return f"v1/events/{run_id}/{place}"


def chunk(run_id: str, place: str, name: str, generation: int, number: int) -> str:
    return f"{generation_prefix(run_id, place, name, generation)}{number}"


def generation_prefix(run_id: str, place: str, name: str, generation: int) -> str:
    return f"v1/events/{run_id}/{place}/{name}/{generation}/"


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
    return json.loads(inflated(data, largest))


def inflated(data: bytes, largest: int) -> bytes:
    """Return what zlib compressed.

    Raises:
        ValueError: it is nothing of the kind, or has more than ``largest`` bytes.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, largest)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"more than {largest} bytes, or cut short")
    return content
