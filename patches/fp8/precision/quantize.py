"""Round weights and activations to 8 bits, in plain torch, on any device.

int8 is symmetric, -127 to 127, as W8A8 kernels require; fp8 is e4m3 (largest value 448). A weight ``w`` [out,
in] is kept as ``q`` of the same shape and a float32 ``scale`` [out, 1] (or [1, 1], one for the tensor) with
``w ≈ q * scale``.
The largest error of one weight is ``scale / 2`` in int8. In fp8 it is 2^-4 of the weight, or ``scale *
2^-10`` for weights below ``scale * 2^-6``; both before the rounding of float32 itself.
"""

from __future__ import annotations

import torch

from flashpatch.errors import PatchError

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
DTYPES = {"int8": torch.int8, "fp8": FP8}

_PATCH = "fp8.quantizer"
BLOCK = 1 << 18  # elements that a thread has in float32 at once, so that they stay in its core's cache
THREADS = 4  # as many threads share a block at most
ON_DEVICE = 1 << 25  # elements of a block on a GPU: 128 MiB, where each block costs launches
_MAGNITUDE = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}  # by bytes of a float: all but its sign
_TINY = torch.finfo(torch.float32).tiny


def quantized(w: torch.Tensor, form: str, granularity: str = "channel") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight to 8 bits.

    Args:
        w: [out, in], any floating dtype.
        form: ``int8`` or ``fp8``.
        granularity: ``channel`` for a scale per output channel, ``tensor`` for one.

    Returns:
        ``q`` [out, in], int8 or float8_e4m3fn, and ``scale``, float32 [out, 1] or [1, 1]. Channels without a
        value other than 0 have scale 1.

    Raises:
        PatchError: the weight is not a matrix, or holds NaN or Inf.
    """
    if w.dim() != 2:
        raise PatchError(
            f"a weight of shape {list(w.shape)} is not a matrix.",
            patch=_PATCH,
            advice="Quantize linear layers only.",
        )
    amax = row_amax(w).float()
    if granularity == "tensor":
        amax = amax.max().reshape(1, 1)
    if not bool((amax < torch.inf).all()):  # nor is NaN; torch.isfinite is several launches
        raise PatchError(
            "a weight holds NaN or Inf values.",
            patch=_PATCH,
            advice="Find where the trainer's weights diverged.",
        )
    dtype = DTYPES[form]
    scale = _scale(amax, dtype)
    q = torch.empty(w.shape, dtype=dtype, device=w.device)
    rows = rows_at_once(w)
    for start in range(0, w.shape[0], rows):  # a block at a time in float32, not the whole weight
        block = slice(start, start + rows)
        q[block] = rounded_to(w[block].float(), scale[block] if len(scale) > 1 else scale, dtype)
    return q, scale


def rounded_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x / scale`` to the nearest value of ``dtype`` (int8 or float8_e4m3fn), clipped to its range."""
    largest = LARGEST[dtype]
    scaled = (x / scale).clamp_(-largest, largest)
    return (scaled.round_() if dtype is torch.int8 else scaled).to(dtype)


def row_amax(w: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row [..., n] of a floating tensor: [..., 1], NaN where a row holds one.

    Bits without the sign are ordered as magnitudes are, NaN above all, and torch compares integers several times as
    fast as bf16.
    """
    w = w.detach()
    if not w.is_cpu or w.dtype.itemsize not in _MAGNITUDE or w.numel() == 0:
        low, high = torch.aminmax(w, dim=-1, keepdim=True)
        return torch.maximum(high, -low)
    integer, mask = _MAGNITUDE[w.dtype.itemsize]
    blocks = w.view(integer).split(rows_at_once(w))
    return torch.cat([(block & mask).amax(-1, keepdim=True) for block in blocks]).view(w.dtype)


def rows_at_once(w: torch.Tensor) -> int:
    """Return how many entries of the first dimension make a block: on a CPU one that stays in the cache in float32."""
    size = BLOCK * min(THREADS, torch.get_num_threads()) if w.is_cpu else ON_DEVICE
    return max(1, size * w.shape[0] // max(1, w.numel()))


def _scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(amax > 0, (amax / LARGEST[dtype]).clamp(min=_TINY), torch.ones_like(amax))
