"""Collect weights in buckets for Ray's object store, and put together what arrives.

A bucket is a list of pieces. A piece is a whole tensor, or a part of one that is larger than a bucket; such parts have
buckets of their own, in order.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.patches.cpu.transfer.errors import transfer_error


@dataclass(frozen=True)
class Piece:
    """Hold consecutive bytes of one tensor.

    Attributes:
        name: of the tensor; shape, dtype: of the whole tensor.
        begin: position of the first byte in the tensor.
        data: the bytes, ``(length,)`` uint8, a numpy array.
        checksum: CRC-32 of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    data: Any
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * as_dtype(self.dtype).itemsize


class Contents:
    """Count the tensors of a transfer; both ends must come to the same `summary`."""

    def __init__(self) -> None:
        self.buckets = self.tensors = self.bytes = 0
        self._names = hashlib.blake2b(digest_size=16)

    def add(self, piece: Piece) -> None:
        """Count one whole tensor, by a piece of it."""
        self.tensors += 1
        self.bytes += piece.nbytes
        self._names.update(repr((piece.name, piece.shape, piece.dtype)).encode())

    def summary(self) -> dict[str, Any]:
        """Return counts, and a digest of all names, shapes and dtypes in order."""
        return {
            "buckets": self.buckets,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "names": self._names.hexdigest(),
        }


def cut(name: str, tensor: torch.Tensor, bucket_size: int) -> Iterator[Piece]:
    """Yield a tensor's pieces, copied: one if it fits in a bucket.

    Args:
        tensor: any shape, dtype, strides and device.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    for begin in range(0, max(flat.numel(), 1), bucket_size):
        data = flat[begin : begin + bucket_size].to("cpu", copy=True).numpy()
        yield Piece(name, shape, dtype, begin, data, zlib.crc32(data))


class Joiner:
    """Put pieces together again, in the order of `cut`."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._whole: torch.Tensor | None = None
        self._first: Piece | None = None
        self._filled = 0

    def take(self, pieces: list[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the tensors that end in this bucket.

        Raises:
            PatchError: a piece does not follow the one before, or its bytes are not those that were sent.
        """
        for piece in pieces:
            if self._first is None:
                self._first, self._filled = piece, 0
                self._whole = torch.empty(piece.nbytes, dtype=torch.uint8)
            first, end = self._first, piece.begin + piece.data.size
            follows = (piece.name, piece.shape, piece.dtype) == (first.name, first.shape, first.dtype)
            if not follows or piece.begin != self._filled or end > piece.nbytes:
                raise transfer_error(
                    f"byte {piece.begin} of {piece.name} arrived where byte {self._filled} of {first.name} was due."
                )
            place = self._whole.numpy()[piece.begin : end]
            place[:] = piece.data
            if (checksum := zlib.crc32(place)) != piece.checksum:
                raise transfer_error(
                    f"{piece.name}, bytes {piece.begin} to {end}, arrived with the CRC-32 {checksum:08x}, and was sent "
                    f"with {piece.checksum:08x}."
                )
            self._filled = end
            if self._filled == piece.nbytes:
                whole, self._whole, self._first = self._whole, None, None
                self.contents.add(piece)
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
