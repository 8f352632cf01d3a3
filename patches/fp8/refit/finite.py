"""Find NaN and infinite values in what was loaded, mostly while it is copied, when it is in the processor's cache."""

from __future__ import annotations

import math

import torch

_LEAST = 1 << 17  # bytes of a copy from which on it is summed at once; below, calls cost more than memory
_BLOCK = 1 << 19  # bytes that are copied, then summed
_PIECE = 1 << 24  # elements of one byte that are looked at at once


def copied(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """Copy ``source`` into ``target``, and sum it.

    Returns:
        A number that is finite only if all of ``target`` is; None if nothing was copied, as the sum would not pay or
        say nothing.
    """
    if target.nbytes < _LEAST or not target.dim() or target.shape != source.shape:
        return None
    if not target.is_cpu or not _summed(target):
        return None
    target = target.detach()
    rows = max(1, _BLOCK * target.shape[0] // target.nbytes)
    sums = []
    for part, values in zip(target.split(rows), source.split(rows), strict=True):
        sums.append(part.copy_(values).sum())
    return torch.stack(sums).sum()


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite. One pass, no copy of the tensor; types of one byte in pieces."""
    data = tensor.detach()
    if not data.dtype.is_floating_point or data.numel() == 0:
        return True
    if not _summed(data):  # e4m3fn has one NaN of either sign and no infinity
        pieces = data.split(max(1, _PIECE * data.shape[0] // data.numel())) if data.dim() else (data,)
        if data.dtype == torch.float8_e4m3fn:
            pieces = (((piece.view(torch.uint8) & 0x7F) != 0x7F).all() for piece in pieces)
        else:
            pieces = (torch.isfinite(piece.to(torch.float32)).all() for piece in pieces)
        return bool(torch.stack(list(pieces)).all())
    if math.isfinite(data.sum().item()):  # NaN and infinity stay in any sum; twice as fast as the extremes
        return True  # a sum that is not finite may have left the range of its type
    low, high = torch.aminmax(data)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _summed(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
