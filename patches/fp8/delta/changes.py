"""Encode the values of a tensor that changed, and write them into a copy of the tensor.

A patch is ``(size,)`` uint8: the new bits of some values, then the gaps between their positions, each of one or two
bytes, whichever is smaller in all. Where a gap does not fit, values in between that did not change come along."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    Patch = tuple[int, int, torch.Tensor]
    """Bytes of a gap, number of values, and the patch."""

_ALIGN = 16  # bytes: what is packed behind a patch stays aligned
_CHUNK = 1 << 19  # values compared at once, so that what comes out stays in a core's cache
_BITS = {1: 8, 2: 16}
"""Bytes of a gap to their bits."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as ``(n,)`` integers of its values' size, sharing its memory."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(-1).view(kinds.get(tensor.element_size(), torch.uint8))


def encode(old: torch.Tensor, new: torch.Tensor, some: bool = False) -> tuple[int, Patch | None]:
    """Return how many values differ, and a patch that makes ``old`` the ``new``; None if there is none to make, or ``new``
    whole is not larger.

    Beside the patch it takes the memory of some `_at_once` values, however many differ.

    Args:
        old: ``(n,)`` integers, see `bits`, on any device.
        new: likewise; where it is, is compared.
        some: make a patch if no value differs too."""
    import torch

    def differs(at: int) -> torch.Tensor:
        return old[at : at + step].to(new.device) != new[at : at + step]

    def found(starts: Iterable[int]) -> Iterator[torch.Tensor]:
        """Yield the gap before each value that differs, of a chunk at a time."""
        last = torch.full((1,), -1, device=new.device)
        for at in starts:
            positions = _nonzero(differs(at))
            if positions.numel():
                gaps = positions.add_(at).sub(1)
                gaps[1:].sub_(positions[:-1])
                gaps[:1].sub_(last)
                last = positions[-1:].clone()
                del positions
                yield gaps

    changed, kept, step = 0, [], _at_once(new.device)
    chunks = range(0, new.numel(), step)
    more = torch.zeros(len(_BITS), dtype=torch.int64, device=new.device)
    for gaps in found(rest := iter(chunks)):
        changed += gaps.numel()
        if _size(min(_BITS), changed, new.itemsize) >= new.nbytes:
            return changed + sum(int(differs(at).sum()) for at in rest), None
        more += torch.stack([(gaps >> size).sum() for size in _BITS.values()])
        if changed * gaps.itemsize <= new.nbytes // 4:  # else they are looked for again
            kept.append(gaps)
    if some and not changed:
        kept = [torch.zeros(1, dtype=torch.int64, device=new.device)]
    sent = changed or len(kept)
    fill = dict(zip(_BITS, more.tolist(), strict=True))
    width = min(fill, key=lambda one: (sent + fill[one]) * (one + new.itemsize))
    count = sent + fill[width]
    if not sent or _size(width, count, new.itemsize) >= new.nbytes:
        return changed, None
    data = torch.zeros(_size(width, count, new.itemsize), dtype=torch.uint8, device=new.device)
    values, short = _parts(data, width, count, new.dtype)
    at, last = 0, torch.full((), -1, device=new.device)
    for gaps in kept if sum(map(len, kept)) == sent else found(chunks):
        gaps = _filled(gaps, _BITS[width])
        positions = (gaps + 1).cumsum(0).add_(last)
        here = slice(at, at + gaps.numel())
        values[here], short[here] = new[positions], gaps.to(short.dtype)
        at, last = here.stop, positions[-1]
    return changed, (width, count, data)


def _at_once(device: torch.device) -> int:
    """Return how many values are compared at once: an accelerator is launched, and waited for, for each such part."""
    return _CHUNK if device.type == "cpu" else 1 << 22


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    import numpy
    import torch

    if mask.device.type == "cpu":  # three times as fast as torch's
        return torch.from_numpy(numpy.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def apply(old: torch.Tensor, width: int, count: int, data: torch.Tensor) -> None:
    """Write a patch into ``old``, ``(n,)`` integers on the CPU; arguments as `encode` returned them. Raises ValueError
    if the patch is not one of such a tensor; nothing was written."""
    import torch

    if width not in _BITS or count < 1 or data.numel() != _size(width, count, old.itemsize):
        raise ValueError(f"a patch of {data.numel()} bytes does not hold {count} values")
    data = data.cpu()
    values, short = _parts(data.clone() if data.data_ptr() % _ALIGN else data, width, count, old.dtype)
    starts, last = range(0, count, _CHUNK), -1
    for write in (False, True):
        for at in starts:
            gaps = short[at : at + _CHUNK].to(torch.int64) & ((1 << _BITS[width]) - 1)
            positions = (gaps + 1).cumsum(0).add_(last)
            last = int(positions[-1])
            if write:
                old.index_copy_(0, positions, values[at : at + _CHUNK])
        if last >= old.numel():
            raise ValueError(f"a patch for position {last} of {old.numel()}")
        last = -1


def _parts(
    data: torch.Tensor, width: int, count: int, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of a patch and its gaps, sharing its memory."""
    end = count * kind.itemsize
    gaps = data[_padded(end) : _padded(end) + count * width]
    return data[:end].view(kind), gaps.view(_kind(width))


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
