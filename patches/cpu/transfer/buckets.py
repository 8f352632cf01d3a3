"""Cut weights into buckets of bytes, and put them together again.

A bucket is one run of bytes and a list of pieces. A piece is a whole tensor, or a part of one that is larger than a
bucket; such parts fill buckets of their own in order.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashpatch.patches.cpu.transfer.errors import transfer_error


@dataclass(frozen=True)
class Piece:
    """Describe consecutive bytes of one tensor in a bucket.

    Attributes:
        name: of the tensor; shape, dtype: of the whole tensor.
        begin: position of the first byte in the tensor; size: bytes.
        offset: position of the first byte in the bucket; checksum: CRC-32; both only in a bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    size: int
    offset: int = -1
    checksum: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * as_dtype(self.dtype).itemsize


class Contents:
    """Count the tensors of a transfer; both ends must come to the same `summary`."""

    def __init__(self) -> None:
        self.buckets = self.tensors = self.bytes = 0
        self._names = hashlib.blake2b(digest_size=16)

    def add(self, name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> None:
        """Count one whole tensor."""
        self.tensors += 1
        self.bytes += nbytes
        self._names.update(repr((name, tuple(shape), dtype)).encode())

    def summary(self) -> dict[str, Any]:
        """Return counts, and a digest of all names, shapes and dtypes in order."""
        return {
            "buckets": self.buckets,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "names": self._names.hexdigest(),
        }


class Bucket:
    """Fill one buffer with pieces.

    Args:
        size: capacity in bytes; memory is touched only as far as it is filled.
    """

    def __init__(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Empty it."""
        self.pieces: list[Piece] = []
        self._length = 0

    def add(self, piece: Piece, data: torch.Tensor) -> bool:
        """Copy a piece's bytes, uint8 on any device, behind the others; False if there is no room."""
        begin, end = self._length, self._length + piece.size
        if end > self._buffer.numel():
            return False
        place = self._buffer[begin:end].copy_(data)
        self._length = end
        self.pieces.append(replace(piece, offset=begin, checksum=zlib.crc32(place.numpy())))
        return True

    @property
    def data(self) -> Any:
        """The filled part, ``(length,)`` uint8, a numpy array."""
        return self._buffer[: self._length].numpy()


def cut(name: str, tensor: torch.Tensor, bucket_size: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield a tensor's pieces, each with its bytes: one if it fits in a bucket.

    Args:
        tensor: any shape, dtype, strides and device.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    for begin in range(0, max(flat.numel(), 1), bucket_size):
        data = flat[begin : begin + bucket_size]
        yield Piece(name, shape, dtype, begin, data.numel()), data


class Joiner:
    """Put pieces together again, in the order of `cut`."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._whole: torch.Tensor | None = None
        self._first: Piece | None = None
        self._filled = 0

    def take(self, pieces: list[Piece], data: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the tensors that end in this bucket, whose bytes are ``(length,)`` uint8, a numpy array.

        Raises:
            PatchError: a piece does not follow the one before, or its bytes are not those that were sent.
        """
        for piece in pieces:
            if self._first is None:
                self._first, self._filled = piece, 0
                self._whole = torch.empty(piece.nbytes, dtype=torch.uint8)
            first, found = self._first, data[piece.offset : piece.offset + piece.size]
            follows = (piece.name, piece.shape, piece.dtype) == (first.name, first.shape, first.dtype)
            if not follows or piece.begin != self._filled or found.size != piece.size:
                raise transfer_error(
                    f"byte {piece.begin} of {piece.name} arrived where byte {self._filled} of {first.name} was due."
                )
            place = self._whole.numpy()[piece.begin : piece.begin + piece.size]
            place[:] = found
            if (checksum := zlib.crc32(place)) != piece.checksum:
                raise transfer_error(
                    f"{piece.name}, bytes {piece.begin} to {piece.begin + piece.size}, arrived with the CRC-32 "
                    f"{checksum:08x}, and was sent with {piece.checksum:08x}."
                )
            self._filled += piece.size
            if self._filled == piece.nbytes:
                whole, self._whole, self._first = self._whole, None, None
                self.contents.add(piece.name, piece.shape, piece.dtype, piece.nbytes)
                yield piece.name, whole.view(as_dtype(piece.dtype)).view(piece.shape)

    def unfinished(self) -> str | None:
        """Name the tensor of which bytes are missing."""
        return self._first.name if self._first else None


def as_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        PatchError: torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise transfer_error(f"a weight has the dtype {name}, which this process's torch does not know.")
    return found
