"""Decode float8_e4m3fn exactly, by integer shifts.

torch's own cast from fp8 to a wider type takes one value at a time on a CPU. Sign, exponent and mantissa of a code
shifted into their places in a float32 give its value times 2^-120, subnormals included; one multiplication mends that."""

from __future__ import annotations

import math
import sys

import torch

from flashpatch.errors import PatchError

LARGEST = 448.0
_SHIFT = 20  # from e4m3's mantissa to float32's
_FIELDS = 0x87F00000 - (1 << 32)  # sign, and the 7 bits of exponent and mantissa, as int32
_BIAS = 2.0**120  # float32's exponent bias less e4m3's
_NAN = 0x7F  # without its sign
_exact: set[bool] = set()  # not empty once `decode` has been found exact in this process


def decode(codes: torch.Tensor, out: torch.Tensor, nan: bool = True) -> torch.Tensor:
    """Write the values of fp8 codes to ``out``.

    Args:
        codes: float8_e4m3fn, any shape and strides.
        out: float32, same shape; every value is exact.
        nan: whether there may be NaN among the codes; if False, theirs become plus or minus 480.

    Returns:
        ``out``."""
    bits = out.view(torch.int32)
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(_SHIFT).bitwise_and_(_FIELDS)
    out.mul_(_BIAS)
    if nan:
        out.masked_fill_(out.abs() > LARGEST, torch.nan)
    return out


def rows_with_nan(codes: torch.Tensor) -> torch.Tensor:
    """Which rows of float8_e4m3fn ``codes`` [n, k] hold a NaN: bool [n]."""
    signed, unsigned = codes.view(torch.int8), codes.view(torch.uint8)
    # each NaN is the largest of one
    if codes.numel() == 0 or (signed.max() < _NAN and unsigned.max() < _NAN + 128):
        return torch.zeros(codes.shape[0], dtype=torch.bool, device=codes.device)
    return (signed & _NAN == _NAN).any(1)


def require_exact() -> None:
    """Check `decode` on all 256 codes against torch's own cast: once, and again wherever numbers are flushed to zero.
    Raises PatchError if this thread flushes subnormal float32 numbers to zero, which costs weights their smallest values."""
    if _exact and not _flushes():
        return
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    found = decode(codes, torch.empty(codes.shape, dtype=torch.float32))
    if not torch.equal(found.nan_to_num(), codes.float().nan_to_num()):
        raise PatchError(
            "fp8 weights cannot be decoded exactly: subnormal float32 numbers are flushed to zero here.",
            patch="fp8.vllm.possible_fp8_kernels",
            advice="Call torch.set_flush_denormal(False), or open the engine in bf16.",
        )
    _exact.add(True)


def _flushes() -> bool:
    """Whether this thread takes subnormal numbers, or results, for zero; Python's own float obeys the same flags."""
    least = sys.float_info.min
    return math.ulp(0.0) * 2.0**1000 == 0.0 or least * 0.5 == 0.0
