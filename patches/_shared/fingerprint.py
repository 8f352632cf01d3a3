"""Compute a tensor's exact fingerprint in parts: two sums of 64 bits over its bytes.

A tensor is read as little-endian words of 8 bytes, in row-major order, the last one padded with zeros. With
x_j the word at position j, as a signed integer, and hi(x_j) its upper half, also signed, the fingerprint is

    (sum_j x_j w_j,  sum_j hi(x_j) u_j)    modulo 2**64

All weights are odd, those of one sum differ in their lower 32 bits over 2**31 positions, and their upper bits
are pseudo-random. Therefore

- any change inside one word, such as one flipped bit, changes the first sum: a difference that is not 0
  modulo 2**64 times an odd number is not 0;
- exchanging two different elements changes one of the sums: the differences are below 2**32, that of the
  weights is not divisible by 2**32, so their product is not divisible by 2**64;
- other changes go unseen with a probability of about 2**-64;
- both sums are linear in the bits, so that parts add up, wherever the tensor is cut, even inside a word.

It is no defence against forgery: the weights are public."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

Sums = tuple[int, int]
NOTHING: Sums = (0, 0)

WORD = 8  # bytes
BLOCK = 1 << 15  # words that share one factor; 256 KiB stay in a core's cache
_GROUP = 64  # blocks handled at once on a device that is no CPU
_MASK = (1 << 64) - 1
_KEPT = 1 << 12  # blocks whose factors are kept: those of the first GiB
_SHARE = 4 << 20  # bytes that make a second thread worth starting


def of(tensor: torch.Tensor, start: int = 0, dtype: torch.dtype | None = None) -> Sums:
    """Return the contribution of a run of consecutive elements to the fingerprint of the whole tensor.

    Args:
        tensor: the run, any shape, dtype, strides and device; read in row-major order. May be empty.
        start: position of its first element in the whole tensor.
        dtype: what the values are cast to before they are read, block by block. None leaves them."""
    flat = tensor.detach().resolve_neg().reshape(-1)
    dtype = dtype or flat.dtype
    size = dtype.itemsize
    first, last = start * size, (start + flat.numel()) * size
    if first == last:
        return NOTHING
    width = 1 if flat.device.type == "cpu" else _GROUP
    step = width * BLOCK * WORD
    groups = range(first // step, -(-last // step))
    parts = [groups]
    if width == 1 and last - first >= _SHARE and torch.get_num_threads() > 1:
        parts = list(_divided(groups, torch.get_num_threads()))

    def work(part: range) -> Sums:
        return _sums(flat, dtype, first, part, width)

    if len(parts) == 1:
        return work(groups)
    with ThreadPoolExecutor(len(parts)) as pool:
        return total(pool.map(work, parts))


def total(parts: Iterator[Sums] | list[Sums]) -> Sums:
    """Sum contributions."""
    first = second = 0
    for one, other in parts:
        first, second = first + one, second + other
    return first & _MASK, second & _MASK


def _divided(groups: range, number: int) -> Iterator[range]:
    share = -(-len(groups) // number)
    for at in range(0, len(groups), share):
        yield groups[at : at + share]


def _sums(flat: torch.Tensor, dtype: torch.dtype, first: int, groups: range, width: int) -> Sums:
    """The contribution of some groups of ``width`` blocks; ``first`` is the position in bytes of ``flat[0]``."""
    size, step, device = dtype.itemsize, width * BLOCK * WORD, flat.device
    last = first + flat.numel() * size
    in_place = flat.dtype == dtype and first % WORD == 0 and flat.storage_offset() * size % WORD == 0
    in_place &= flat.stride(0) == 1  # an evenly strided tensor stays a view when it is flattened
    room = high = None
    one = torch.zeros(len(groups), width, dtype=torch.int64, device=device)
    two = torch.zeros_like(one)
    places = zip(one.view(-1).unbind(), two.view(-1).unbind(), strict=True) if width == 1 else None
    most = min(width * BLOCK, -(-(last - first) // WORD) + 1)  # words of a group
    for row, group in enumerate(groups):
        begin, end = max(first, group * step), min(last, (group + 1) * step)
        values = flat[(begin - first) // size : (end - first) // size]
        whole = in_place and (end - begin) % WORD == 0
        if whole and (width == 1 or end - begin == step):
            words, at = values.view(torch.int64), begin // WORD % BLOCK
        else:
            room = (
                torch.zeros(width * BLOCK, dtype=torch.int64, device=device) if room is None else room.zero_()
            )
            offset = (begin - group * step) // size
            room.view(dtype)[offset : offset + values.numel()].copy_(values)
            words, at = room, 0
            most = width * BLOCK
        if width == 1:
            weights = (
                _weights(0, device)[at : at + words.numel()],
                _weights(1, device)[at : at + words.numel()],
            )
            if high is None or high.numel() < words.numel():
                high = torch.empty(most, dtype=torch.int64, device=device)
            upper = torch.bitwise_right_shift(words, 32, out=high[: words.numel()])
            here = next(places)
            torch.dot(words, weights[0], out=here[0])
            torch.dot(upper, weights[1], out=here[1])
        else:
            blocks = words.view(width, BLOCK)
            one[row] = (blocks * _weights(0, device)).sum(1)
            two[row] = (blocks.view(torch.int32)[:, 1::2] * _weights(1, device)).sum(1)
    count = len(groups) * width
    return tuple(  # type: ignore[return-value]
        int((sums.view(-1) * _factors(which, groups.start * width, count, device)).sum()) & _MASK
        for which, sums in enumerate((one, two))
    )


@cache
def _weights(which: int, device: torch.device) -> torch.Tensor:
    """``(BLOCK,)`` int64: in the lower 32 bits 2 i + 1, above pseudo-random."""
    places = torch.arange(BLOCK, device="cpu")
    return _joined(2 * places + 1, places + (2 * which << 33)).to(device)


def _factors(which: int, begin: int, number: int, device: torch.device) -> torch.Tensor:
    """``(number,)`` int64, one for each block from ``begin``: in the lower 32 bits 2 BLOCK k + 1.

    The product with the weight at i has (2 BLOCK k + 1) (2 i + 1) in its lower 32 bits: i follows from it
    modulo 2 BLOCK, and then k, so no two positions have the same below 2**31."""
    if begin + number <= _KEPT:
        return _first_factors(which, device)[begin : begin + number]
    return _computed_factors(which, begin, number).to(device)


@cache
def _first_factors(which: int, device: torch.device) -> torch.Tensor:
    return _computed_factors(which, 0, _KEPT).to(device)


def _computed_factors(which: int, begin: int, number: int) -> torch.Tensor:
    blocks = torch.arange(begin, begin + number, device="cpu")
    return _joined(2 * BLOCK * blocks + 1, blocks + ((2 * which + 1) << 33))


def _joined(low: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Lower 32 bits of ``low`` under the upper bits of a mixture of ``seed``."""
    mixed = seed * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed & ~0xFFFFFFFF) | (low & 0xFFFFFFFF)
