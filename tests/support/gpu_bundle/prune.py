"""Reduce the GPU code in a shared library to what one compute capability loads."""

import struct
from pathlib import Path

_MAGIC, _HEADER = b"\x50\xed\x55\xba", 16
_PTX, _CUBIN = 1, 2


def reduce(source: Path, target: Path, capability: int) -> int:
    """Write a copy of a library that compresses well; return how many of its fatbins were reduced.

    A fatbin keeps its cubins of the capability, else the PTX of the highest capability up to it. What is kept moves to the
    front of its container, whose size is set; zeros follow, so that no address of the library changes.

    ``source``: an ELF file with CUDA fatbins; ``target``: where to write; ``capability``: ten times the compute capability."""
    data, position, reduced = bytearray(source.read_bytes()), 0, 0
    while 0 <= (position := data.find(_MAGIC, position)) <= len(data) - _HEADER:
        _, version, header, size = struct.unpack_from("<IHHQ", data, position)
        begin, end = position + header, position + header + size
        if (version, header) != (1, _HEADER) or end > len(data):
            position += 4
            continue
        if entries := _entries(data, begin, end):
            body = b"".join(_kept(entries, capability))
            data[begin:end] = body + bytes(size - len(body))
            struct.pack_into("<Q", data, position + 8, len(body))
            reduced += 1
        position = end
    target.write_bytes(data)
    return reduced


def _entries(data: bytearray, begin: int, end: int) -> list[tuple[int, int, bytes]]:
    """Return kind, capability and bytes of each entry; nothing of a container that holds anything else."""
    found = []
    while begin < end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, begin)
        length = header + payload
        if kind not in (_PTX, _CUBIN, 16) or header < 32 or begin + length > end:
            return []
        (capability,) = struct.unpack_from("<I", data, begin + 28)
        found.append((kind, capability, bytes(data[begin : begin + length])))
        begin += length
    return found


def _kept(entries: list[tuple[int, int, bytes]], capability: int) -> list[bytes]:
    cubins = [code for kind, at, code in entries if (kind, at) == (_CUBIN, capability)]
    portable = max(
        ((at, code) for kind, at, code in entries if kind == _PTX and at <= capability), default=None
    )
    return cubins or [portable[1] if portable else min((code for *_, code in entries), key=len)]
