"""Encode the values of a tensor that changed, and write them into a copy of the tensor.

A patch is ``(size,)`` uint8: the new bits of some values, then the gaps between their positions, each of one or two
bytes, whichever is smaller in all. Where a gap does not fit, values in between that did not change come along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGN = 16  # bytes: what is packed behind a patch stays aligned
_CHUNK = 1 << 21  # values compared at once, so that what comes out stays in a core's cache
_BITS = {1: 8, 2: 16}
"""Bytes of a gap to their bits."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as ``(n,)`` integers of its values' size, sharing its memory."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(-1).view(kinds.get(tensor.element_size(), torch.uint8))


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the ``(k,)`` int64 positions, in order, at which two ``(n,)`` integer tensors differ."""
    import torch

    starts = range(0, new.numel(), _CHUNK)
    found = [_nonzero(old[at : at + _CHUNK] != new[at : at + _CHUNK]).add_(at) for at in starts]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    import numpy
    import torch

    if mask.device.type == "cpu":  # three times as fast as torch's
        return torch.from_numpy(numpy.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def encode(new: torch.Tensor, positions: torch.Tensor) -> tuple[int, int, torch.Tensor] | None:
    """Return a patch that writes ``new[positions]``, or None if all of ``new`` is not larger.

    Args:
        new: ``(n,)`` integers, see `bits`.
        positions: ``(k,)`` int64 in order, at least one.

    Returns:
        Bytes of a gap, number of values, and the patch.
    """
    import torch

    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    counts = {width: positions.numel() + int((gaps >> bits).sum()) for width, bits in _BITS.items()}
    width = min(counts, key=lambda one: counts[one] * (one + new.itemsize))
    if _size(width, counts[width], new.itemsize) >= new.nbytes:
        return None
    gaps = _filled(gaps, _BITS[width])
    values = new[(gaps + 1).cumsum(0) - 1]
    data = torch.zeros(_size(width, gaps.numel(), new.itemsize), dtype=torch.uint8, device=new.device)
    end = _padded(values.nbytes)
    data[: values.nbytes] = values.view(torch.uint8)
    data[end : end + gaps.numel() * width] = gaps.to(_kind(width)).view(torch.uint8)
    return width, gaps.numel(), data


def apply(old: torch.Tensor, width: int, count: int, data: torch.Tensor) -> None:
    """Write a patch into ``old``, ``(n,)`` integers on the CPU; arguments as `encode` returned them.

    Raises:
        ValueError: the patch is not one of such a tensor; nothing was written.
    """
    import torch

    if width not in _BITS or count < 1 or data.numel() != _size(width, count, old.itemsize):
        raise ValueError(f"a patch of {data.numel()} bytes does not hold {count} values")
    data = data.to("cpu", copy=True)  # its own memory, which is aligned
    end = _padded(count * old.itemsize)
    values = data[: count * old.itemsize].view(old.dtype)
    gaps = data[end : end + count * width].view(_kind(width)).to(torch.int64) & ((1 << _BITS[width]) - 1)
    positions = (gaps + 1).cumsum(0) - 1
    if int(positions[-1]) >= old.numel():
        raise ValueError(f"a patch for position {int(positions[-1])} of {old.numel()}")
    old.index_copy_(0, positions, values)


def _filled(gaps: torch.Tensor, bits: int) -> torch.Tensor:
    """Return gaps that fit into so many bits, by further positions in between."""
    largest = (1 << bits) - 1
    ends = ((gaps >> bits) + 1).cumsum(0) - 1
    if int(ends[-1]) == gaps.numel() - 1:
        return gaps
    filled = gaps.new_full((int(ends[-1]) + 1,), largest)
    filled[ends] = gaps & largest
    return filled


def _kind(width: int) -> torch.dtype:
    import torch

    return torch.uint8 if width == 1 else torch.int16


def _size(width: int, count: int, itemsize: int) -> int:
    return _padded(_padded(count * itemsize) + count * width)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
