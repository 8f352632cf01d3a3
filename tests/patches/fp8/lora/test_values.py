"""Whether values are finite, and which they are, with the package xxhash and without it."""

import pytest
import torch

from flashpatch.patches.fp8.lora import values


@pytest.fixture(params=["xxhash", ""], ids=["xxhash", "without"], autouse=True)
def package(request, monkeypatch):
    if request.param:
        pytest.importorskip("xxhash")
    else:
        monkeypatch.setattr(values, "xxhash", None)


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(shape).to(dtype) for shape, dtype in (((3, 5), torch.bfloat16), ((7, 2), torch.float32))
    ]


def test_every_bit_counts():
    whole = values.read(tensors())
    assert whole[0] and values.read(tensors()) == whole
    seen = {whole[1]}
    for number, tensor in enumerate(tensors()):
        bits = tensor.reshape(-1).view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
        for at in range(len(bits)):
            for bit in range(8 * bits.element_size()):
                changed = tensors()
                flat = changed[number].view(-1).view(bits.dtype)
                flat[at] ^= torch.tensor(1).to(bits.dtype) << bit
                seen.add(values.read(changed)[1])
    assert len(seen) == 1 + 15 * 16 + 14 * 32


def test_strides_do_not_count():
    one, two = tensors()
    assert values.read([one.t().contiguous().t(), two]) == values.read([one, two])
    assert values.read([one.requires_grad_(), two]) == values.read([one, two])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_seen(value, dtype):
    found = torch.ones(40, 33, dtype=dtype)
    assert values.read([found, torch.ones(2)])[0]
    found[20, 7] = value
    assert not values.read([found, torch.ones(2)])[0]
    found[21, 7] = -value  # together they are no infinity
    assert not values.read([found, torch.ones(2)])[0]
