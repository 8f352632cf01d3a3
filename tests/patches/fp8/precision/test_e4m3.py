"""fp8 codes decoded by integer shifts, and matrices quantized to them, against torch's own casts."""

import pytest
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.precision import e4m3
from flashpatch.patches.fp8.precision.scaled_quant import scaled_fp8_quant

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)


def empty(shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def test_every_code_has_its_value() -> None:
    found, want = e4m3.decode(CODES, empty(CODES.shape)), CODES.float()
    assert int(want.isnan().sum()) == 2 and torch.equal(found.isnan(), want.isnan())
    numbers = ~want.isnan()
    assert torch.equal(found[numbers].view(torch.int32), want[numbers].view(torch.int32))  # -0 is not 0 here
    as_numbers = e4m3.decode(CODES, empty(CODES.shape), nan=False)
    assert torch.equal(as_numbers[numbers], want[numbers])
    assert as_numbers[~numbers].abs().tolist() == [480, 480]


def test_rows_with_nan_are_found() -> None:
    codes = CODES.clone().view(8, 32)
    assert e4m3.rows_with_nan(codes).tolist() == [False] * 3 + [True] + [False] * 3 + [True]
    codes.view(torch.uint8)[codes.float().isnan()] = 0
    assert not e4m3.rows_with_nan(codes).any()


def test_flushed_subnormals_are_noticed() -> None:
    e4m3.require_exact()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers to zero")
    try:
        with pytest.raises(PatchError, match="set_flush_denormal"):
            e4m3.require_exact()
    finally:
        torch.set_flush_denormal(False)
    e4m3.require_exact()


def test_the_default_dtype_does_not_matter() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        e4m3.require_exact()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_matrix_is_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scale = scaled_fp8_quant(x)
    assert scale.shape == (1,) and float(scale) == float(x.abs().max().float() / 448)
    error = (codes.double() * scale.double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2**-4, scale.double() * 2**-10) * (1 + 1e-6)).all()
    given, same = scaled_fp8_quant(x, scale)
    assert same is scale and torch.equal(given.view(torch.uint8), codes.view(torch.uint8))


def test_scales_per_row_column_and_group() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    rows, scale = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert scale.shape == (6, 1) and torch.equal(rows.float().abs().amax(1), torch.full((6,), 448.0))
    bounded, upper = scaled_fp8_quant(x, use_per_token_if_dynamic=True, scale_ub=torch.tensor(0.448))
    assert float(upper.max()) == pytest.approx(0.001) and float(bounded.float().abs().max()) == 448
    by_row, _ = scaled_fp8_quant(x, scale.view(-1), group_shape=(1, -1))
    by_group, _ = scaled_fp8_quant(x, scale)  # [6, 1]: groups of one row
    assert torch.equal(by_row.view(torch.uint8), by_group.view(torch.uint8))
    by_column, _ = scaled_fp8_quant(x, torch.arange(1.0, 9.0), group_shape=(-1, 1))
    want = (x * torch.arange(1.0, 9.0).reciprocal()).to(torch.float8_e4m3fn)
    assert torch.equal(by_column.float(), want.float())
    padded, _ = scaled_fp8_quant(x, num_token_padding=17)
    assert padded.shape == (17, 8) and not padded[6:].float().any()
