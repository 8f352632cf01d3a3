"""Cut weights into pieces for Ray's object store, and put together what arrives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from flashpatch.patches.cpu.exchange import transfer_error


class Piece(NamedTuple):
    """Hold consecutive bytes of one tensor: all of them, or a part of one larger than a bucket; parts come in order.

    Attributes:
        name, shape, dtype: of the whole tensor.
        begin: position of the first byte in the tensor.
        data: the bytes, ``(length,)`` uint8, a numpy array.
        checksum: CRC-32 of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    data: Any
    checksum: int


class Contents:
    """Count what passes at one end; both ends must come to the same."""

    def __init__(self) -> None:
        self.buckets = self.tensors = self.bytes = self.checksum = 0

    def add(self, piece: Piece) -> None:
        """Count a piece; the checksum is of names, shapes, dtypes and bytes in their order."""
        self.tensors += piece.begin == 0
        self.bytes += piece.data.size
        identity = (piece.name, piece.shape, piece.dtype, piece.begin, piece.checksum)
        self.checksum = zlib.crc32(repr(identity).encode(), self.checksum)


def cut(name: str, tensor: torch.Tensor, bucket_size: int) -> Iterator[Piece]:
    """Yield the pieces, copied, of a tensor of any shape, dtype, strides and device: one if it fits in a bucket."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, max(flat.numel(), 1), bucket_size):
        data = flat[begin : begin + bucket_size].to("cpu", copy=True).numpy()
        yield Piece(name, tuple(tensor.shape), tensor.dtype, begin, data, zlib.crc32(data))


class Joiner:
    """Put pieces together again, in the order of `cut`; `contents` tells afterwards whether all came."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._whole: torch.Tensor | None = None

    def take(self, pieces: list[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the tensors that end in this bucket. Raises PatchError if bytes are not those that were sent."""
        for piece in pieces:
            end, size = piece.begin + piece.data.size, torch.Size(piece.shape).numel() * piece.dtype.itemsize
            if self._whole is None:
                self._whole = torch.empty(size, dtype=torch.uint8)
            place = self._whole.numpy()[piece.begin : end]
            place[:] = piece.data
            if (checksum := zlib.crc32(place)) != piece.checksum:
                raise transfer_error(
                    f"{piece.name}, bytes {piece.begin} to {end}, arrived with the CRC-32 {checksum:08x}, and was sent "
                    f"with {piece.checksum:08x}."
                )
            self.contents.add(piece)
            if end == size:
                whole, self._whole = self._whole, None
                yield piece.name, whole.view(piece.dtype).view(piece.shape)
