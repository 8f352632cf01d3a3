"""Send JSON among named tensors, as tensors of bytes whose names are no parameter's.

Their sizes are multiples of 512 bytes, so that whatever is packed behind them stays aligned, also in versions of verl
that do not align."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGN = 512  # bytes
_PIECE = 64 << 10  # bytes; a message larger than that travels in several tensors, for the smallest of buckets


def encode(name: str, content: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a message as ``(size,)`` uint8 tensors, whose names begin with ``name``."""
    import torch

    packed = zlib.compress(json.dumps(content).encode(), 1)
    data = struct.pack("<QI", len(packed), zlib.crc32(packed)) + packed
    data += bytes(-len(data) % ALIGN)
    number = -(-len(data) // _PIECE)
    for i in range(number):
        piece = bytearray(data[i * _PIECE : (i + 1) * _PIECE])
        yield f"{name}{i}-{number}", torch.frombuffer(piece, dtype=torch.uint8).to(device)


class Message:
    """Join the pieces of one message."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> Any:
        """Add one piece; return the content once all have arrived, None before. Raises ValueError if the bytes are not
        what was sent."""
        index, number = map(int, name.rpartition("__")[2].split("-"))
        self._pieces[index] = tensor.detach().cpu().contiguous().view(-1).numpy().tobytes()
        if len(self._pieces) < number:
            return None
        data = b"".join(self._pieces[i] for i in range(number))
        length, check = struct.unpack_from("<QI", data)
        packed = data[12 : 12 + length]
        if len(packed) != length or zlib.crc32(packed) != check:
            raise ValueError("a message of FlashPatch's own arrived damaged")
        return json.loads(zlib.decompress(packed))
