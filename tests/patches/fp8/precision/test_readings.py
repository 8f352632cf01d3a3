"""NaN and infinite values are found in every tensor that comes."""

import fp8_toys as toys
import pytest
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.precision.quantize import largest

B = toys.checkpoint(1)
WIDE = "layers.0.down.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 9, -1])
def test_one_value_that_is_not_finite_ends_the_update(value, at):
    weights = {name: tensor.clone() for name, tensor in B}
    weights[WIDE].view(-1)[at] = value
    with pytest.raises(PatchError, match=f"{WIDE} holds NaN or Inf"):
        toys.engine().update(list(weights.items()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_hides_nothing_and_never_leaves_the_range(dtype):
    most = torch.finfo(dtype).max
    values = torch.full((1000,), most, dtype=dtype)
    assert not torch.isfinite(values.sum()) and largest(values) == most == largest(values[0])
    for value in (float("nan"), float("inf"), -float("inf")):
        values[500], values[501] = value, -value  # infinities of both signs
        assert not largest(values).isfinite()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_types_of_one_byte_are_looked_at_by_their_bits_or_in_blocks(monkeypatch, dtype):
    monkeypatch.setattr(quantize, "BLOCK", 64)
    for values in (torch.ones(100, 8), torch.ones(8, 100).t(), torch.tensor(1.0)):
        values = values.to(dtype)
        assert largest(values) == 1
        for byte in range(256) if values.dim() else ():
            values.view(torch.uint8)[70, 3] = byte
            expected = values.float().abs().max()
            assert torch.equal(largest(values).nan_to_num(-1), expected.nan_to_num(-1))
