"""Round weights and activations to 8 bits, in plain torch, on any device.

int8 is symmetric, -127 to 127, as W8A8 kernels require; fp8 is e4m3 (largest value 448). A weight ``w`` [out,
in] is kept as ``q`` of the same shape and a float32 ``scale`` [out, 1] (or [1, 1], one for the tensor) with
``w ≈ q * scale``. An activation ``x`` [tokens, in] gets a scale per token while it passes (dynamic).
The largest error of one weight is ``scale / 2`` in int8. In fp8 it is 2^-4 of the weight, or ``scale *
2^-10`` for weights below ``scale * 2^-6``; both before the rounding of float32 itself.
SmoothQuant: Xiao et al. 2023, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from flashpatch.errors import PatchError

if TYPE_CHECKING:
    from flashpatch.patches.fp8.calibration.profile_file import Profile

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
DTYPES = {"int8": torch.int8, "fp8": FP8}

_PATCH = "fp8.quantizer"
_BLOCK = 1 << 20  # elements that are in float32 at once
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
    low, high = torch.aminmax(w, dim=1, keepdim=True)
    amax = torch.maximum(high, -low).float()
    if granularity == "tensor":
        amax = amax.max().reshape(1, 1)
    if not bool(torch.isfinite(amax).all()):
        raise PatchError(
            "a weight holds NaN or Inf values.",
            patch=_PATCH,
            advice="Find where the trainer's weights diverged.",
        )
    dtype = DTYPES[form]
    scale = _scale(amax, dtype)
    q = torch.empty(w.shape, dtype=dtype, device=w.device)
    rows = max(1, _BLOCK // max(1, w.shape[1]))
    for start in range(0, w.shape[0], rows):  # a block at a time in float32, not the whole weight
        block = slice(start, start + rows)
        q[block] = rounded_to(w[block].float(), scale[block] if len(scale) > 1 else scale, dtype)
    return q, scale


def dynamic(x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an activation to 8 bits, with one scale per token.

    Args:
        x: [tokens, in], any floating dtype.
        form: ``int8`` or ``fp8``.

    Returns:
        ``q`` [tokens, in] and ``scale``, float32 [tokens, 1].
    """
    x = x.float()
    return _rounded(x, x.abs().amax(1, keepdim=True), DTYPES[form])


def rounded_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x / scale`` to the nearest value of ``dtype`` (int8 or float8_e4m3fn), clipped to its range."""
    largest = LARGEST[dtype]
    scaled = (x / scale).clamp(-largest, largest)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype)


def dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``q * scale`` in float32."""
    return q.float() * scale


def w8a8(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer with int8 weights and activations that are rounded per token.

    The products are summed exactly, as int32.

    Args:
        x: [tokens, in], any floating dtype.
        q: int8 [out, in].
        scale: float32 [out, 1] or [1, 1].
        bias: [out].

    Returns:
        [tokens, out] in the dtype of ``x``.
    """
    xq, x_scale = dynamic(x, "int8")
    out = torch._int_mm(xq, q.t()).float() * x_scale * scale.t()
    return (out if bias is None else out + bias).to(x.dtype)


def weight_only(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer with 8-bit weights and unquantized activations.

    Args:
        x: [tokens, in], any floating dtype.
        q: int8 or float8_e4m3fn [out, in]; every value of either is exact in bfloat16.
        scale: float32 [out, 1] or [1, 1].
        bias: [out].

    Returns:
        [tokens, out] in the dtype of ``x``.
    """
    out = torch.nn.functional.linear(x, q.to(x.dtype)).float() * scale.t()
    return (out if bias is None else out + bias).to(x.dtype)


def smooth_scale(
    act_amax: torch.Tensor, weight_amax: Sequence[torch.Tensor], alpha: float = 0.5
) -> torch.Tensor:
    """Return SmoothQuant's scale, which moves range from the activations into the weights.

    Args:
        act_amax: [in], largest absolute activation per channel.
        weight_amax: for every layer that consumes the activation, [in], its largest absolute weight per
            input channel.
        alpha: 0 evens out the weights, 1 the activations.

    Returns:
        float32 [in]: activations are divided by it, weights multiplied. 1 where either side is all zero.

    Raises:
        PatchError: ``alpha`` is outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise PatchError(f"alpha is {alpha}.", patch=_PATCH, advice="Give a number from 0 to 1.")
    act, weight = act_amax.double(), torch.stack([w.double() for w in weight_amax]).amax(0)
    scale = act.pow(alpha) / weight.pow(1 - alpha)
    usable = (act > 0) & (weight > 0) & torch.isfinite(scale)
    return torch.where(usable, scale, 1.0).clamp(1e-5, 1e5).float()


def stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    form: str,
    granularity: str = "channel",
    profile: Profile | None = None,
    chosen: Callable[[str, torch.Tensor], bool] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Smooth, then round a trainer's weights for an engine, one tensor at a time.

    Args:
        weights: name and bf16 tensor, whole (not cut by tensor parallelism), in any order.
        form: ``int8`` or ``fp8``.
        granularity: ``channel`` or ``tensor``.
        profile: what to smooth, and which weights to round.
        chosen: which weights to round, from name and tensor, where there is no profile to say so.

    Yields:
        For a rounded weight its ``q`` under its own name and the scale under ``NAME_scale``, as in a
        compressed-tensors checkpoint; every other tensor as it is, or smoothed.

    Raises:
        PatchError: neither profile nor ``chosen``; a shape that the profile was not made for; NaN or Inf.
    """
    if profile is None and chosen is None:
        raise PatchError(
            "neither a profile nor a choice of weights to round is given.",
            patch=_PATCH,
            advice="Give a profile.",
        )
    for name, tensor in weights:
        new = tensor if profile is None else profile.smoothed(name, tensor)
        if name in profile.quantized if profile is not None else chosen(name, tensor):
            try:
                q, scale = quantized(new, form, granularity)
            except PatchError as error:
                raise PatchError(f"{name}: {error.problem}", patch=_PATCH, advice=error.advice) from error
            yield name, q
            yield f"{name}_scale", scale
        else:
            yield name, new


def _rounded(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(amax, dtype)
    return rounded_to(x, scale, dtype), scale


def _scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(amax > 0, (amax / LARGEST[dtype]).clamp(min=_TINY), torch.ones_like(amax))
