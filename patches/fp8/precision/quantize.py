"""Round weights and activations to 8 bits, in plain torch, on any device.

int8 is symmetric, -127 to 127, as W8A8 kernels require; fp8 is e4m3 (largest value 448). A weight ``w`` [out, in] is
kept as ``q`` of the same shape and a float32 ``scale`` [out, 1] (or [1, 1], one for the tensor) with ``w ≈ q * scale``.
The largest error of one weight is ``scale / 2`` in int8. In fp8 it is 2^-4 of the weight, or ``scale * 2^-10`` for
weights below ``scale * 2^-6``; both before the rounding of float32 itself."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
DTYPES = {"int8": torch.int8, "fp8": FP8}

BLOCK = 1 << 18  # elements that a thread has in float32 at once, so that they stay in its core's cache
THREADS = 4  # as many threads share a block at most
ON_DEVICE = 1 << 23  # elements of a block on a GPU: 32 MiB, where each block costs three launches
_MAGNITUDE = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}  # by bytes of a float: all but its sign
_SIGNED = (FP8, torch.float8_e5m2)  # of one byte: a sign, then a magnitude, NaN above all others
_TINY = torch.finfo(torch.float32).tiny


def quantized(w: torch.Tensor, form: str, granularity: str = "channel") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight to 8 bits.

    Args:
        w: [out, in], or [experts, out, in] with a scale per channel; any floating dtype.
        form: ``int8`` or ``fp8``.
        granularity: ``channel`` for a scale per output channel, ``tensor`` for one.

    Returns:
        ``q``, shaped like w, int8 or float8_e4m3fn, and ``scale``, float32 [..., out, 1] or [1, 1]. Channels without a
        value other than 0 have scale 1; where there is NaN or Inf, so is the scale."""
    dtype = DTYPES[form]
    scale = scales(row_amax(w) if granularity == "channel" else largest(w).view(1, 1), dtype)
    q = torch.empty(w.shape, dtype=dtype, device=w.device)
    rows = rows_at_once(w)
    for start in range(0, w.shape[0], rows):  # a block at a time in float32, not the whole weight
        block = slice(start, start + rows)
        q[block] = _scaled(w[block], scale[block] if len(scale) > 1 else scale, dtype)  # needs no clipping
    return q, scale


def scales(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales for largest magnitudes (float32): 1 where there is nothing but 0."""
    some = torch.nn.functional.threshold(amax, 0.0, LARGEST[dtype])
    return some.div_(LARGEST[dtype]).clamp_(min=_TINY)


def rounded_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x / scale`` to the nearest value of ``dtype`` (int8 or float8_e4m3fn), clipped to its range."""
    return _scaled(x, scale, dtype).clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = x / scale
    return scaled.round_() if dtype is torch.int8 else scaled


def largest(w: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a floating tensor: float32 [], NaN if it holds one."""
    w = w.detach()
    if w.dtype in _SIGNED:  # the bits of the largest value, and of the smallest if one is negative
        bits = [w.view(integer).amax().view(w.dtype) for integer in (torch.int8, torch.uint8)]
        return torch.stack([one.float() for one in bits]).abs().amax()
    if w.dtype.itemsize == 1:
        return torch.stack([part.float().abs().amax() for part in w.reshape(-1).split(BLOCK)]).amax()
    if w.is_cpu:
        return row_amax(w if w.dim() else w[None]).max()
    return torch.linalg.vector_norm(w, torch.inf, dtype=wide(w.dtype)).float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a dtype that is wider; torch's own function would be an operator."""
    return dtype if dtype.itemsize > 4 else torch.float32


def row_amax(w: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row [..., n] of a floating tensor: float32 [..., 1], NaN where a row holds one.

    Bits without the sign are ordered as magnitudes are, NaN above all, and torch compares integers several times as
    fast as bf16 on a CPU."""
    w = w.detach()
    if not w.is_cpu or w.dtype.itemsize not in _MAGNITUDE or w.numel() == 0:
        return torch.linalg.vector_norm(w, torch.inf, dim=-1, keepdim=True, dtype=wide(w.dtype)).float()
    integer, mask = _MAGNITUDE[w.dtype.itemsize]
    blocks = w.view(integer).split(rows_at_once(w))
    return torch.cat([(block & mask).amax(-1, keepdim=True) for block in blocks]).view(w.dtype).float()


def rows_at_once(w: torch.Tensor) -> int:
    """Return how many entries of the first dimension make a block: on a CPU one that stays in the cache in float32."""
    size = BLOCK * min(THREADS, torch.get_num_threads()) if w.is_cpu else ON_DEVICE
    return max(1, size * w.shape[0] // max(1, w.numel()))
