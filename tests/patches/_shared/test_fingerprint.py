"""The fingerprint is what its definition says, with weights that show every flipped bit and every exchange, and adds up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches._shared import fingerprint

NAMES = "float32 bfloat16 float16 float64 float8_e4m3fn int8 uint8 int16 int32 int64 bool"
DTYPES = [getattr(torch, name) for name in NAMES.split()]
ALL = (1 << 64) - 1


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def by_definition(data: bytes, start: int = 0) -> tuple[int, int]:
    """Word by word, in Python's integers; ``start`` in bytes."""
    data = bytes(start) + data
    data += bytes(-len(data) % 8)
    first = second = 0
    for at in range(len(data) // 8):
        word = int.from_bytes(data[8 * at : 8 * at + 8], "little", signed=True)
        block, i = divmod(at, fingerprint.BLOCK)
        weights = [
            int(fingerprint._weights(which, torch.device("cpu"))[i])
            * int(fingerprint._factors(which, block, 1, torch.device("cpu"))[0])
            for which in (0, 1)
        ]
        first += word * weights[0]
        second += (word >> 32) * weights[1]
    return first & ALL, second & ALL


def raw(dtype: torch.dtype, number: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs and all."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (number,), generator=draw).bool()
    data = torch.randint(0, 256, (number * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    return data.view(dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [0, 1, 3, 8, 257])
def test_it_is_what_the_definition_says(dtype, number):
    tensor = raw(dtype, number)
    assert fingerprint.of(tensor) == by_definition(as_bytes(tensor))
    assert fingerprint.of(tensor, start=5) == by_definition(as_bytes(tensor), 5 * dtype.itemsize)


def test_the_definition_beyond_one_block():
    """Three blocks, begun inside the first, on one thread and on several."""
    start = fingerprint.BLOCK * 4 - 6
    tensor = raw(torch.bfloat16, fingerprint.BLOCK * 4 + 17)
    assert fingerprint.of(tensor, start) == by_definition(as_bytes(tensor), 2 * start)
    large = raw(torch.int32, 5 << 20)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fingerprint.of(large)
        torch.set_num_threads(3)
        assert fingerprint.of(large) == alone
    finally:
        torch.set_num_threads(threads)


def test_an_accelerators_way_gives_the_same(monkeypatch):
    """Several blocks at once, as where the device is no CPU; the arithmetic itself is the CPU's here."""
    tensor = raw(torch.bfloat16, fingerprint.BLOCK * 4 * 5 + 33)
    flat = tensor.view(-1)
    for start, width in ((0, 2), (7, 4), (fingerprint.BLOCK * 8, 2)):
        size = 2
        first, last = start * size, (start + flat.numel()) * size
        step = width * fingerprint.BLOCK * 8
        groups = range(first // step, -(-last // step))
        assert fingerprint._sums(flat, flat.dtype, first, groups, width) == fingerprint.of(tensor, start)


def test_the_weights_are_what_the_proof_needs():
    """Odd, and with lower halves that differ over 2**31 positions: checked in full in a block, and for all
    blocks at once by the arithmetic that the proof uses."""
    cpu = torch.device("cpu")
    low, size = (1 << 32) - 1, fingerprint.BLOCK
    for which in (0, 1):
        weights = fingerprint._weights(which, cpu) & low
        assert torch.equal(weights, 2 * torch.arange(size) + 1)
        factors = fingerprint._factors(which, 0, 1 << 16, cpu) & low  # 2**31 words in all
        assert torch.equal(factors, 2 * size * torch.arange(1 << 16) + 1)
        for i in (0, 1, 77, size - 1):
            products = (factors * weights[i]) & low
            assert torch.all(products % (2 * size) == 2 * i + 1)  # the place in the block can be read off
            assert products.unique().numel() == products.numel()  # and then the block
    assert not torch.equal(fingerprint._weights(0, cpu), fingerprint._weights(1, cpu))


@settings(max_examples=80)
@given(dtype=st.sampled_from(DTYPES), cuts=st.lists(st.integers(0, 200), max_size=6), seed=st.integers(0, 99))
def test_parts_add_up_wherever_the_tensor_is_cut(dtype, cuts, seed):
    """Also inside a word, also empty parts."""
    tensor = raw(dtype, 200, seed)
    edges = [0, *sorted(cuts), 200]
    parts = [fingerprint.of(tensor[a:b], a) for a, b in zip(edges, edges[1:], strict=False)]
    assert fingerprint.total(parts) == fingerprint.of(tensor)


def test_strides_and_offsets_do_not_matter():
    tensor = torch.randn(33, 17)
    whole = fingerprint.of(tensor.T.contiguous())
    assert fingerprint.of(tensor.T) == whole
    padded = torch.zeros(33 * 17 + 1)
    padded[1:] = tensor.T.reshape(-1)
    assert fingerprint.of(padded[1:]) == whole
    assert fingerprint.of(torch.tensor(1.5)) == fingerprint.of(torch.tensor([1.5]))


def test_the_cast_is_part_of_it():
    tensor = torch.randn(100_003)
    assert fingerprint.of(tensor, dtype=torch.bfloat16) == fingerprint.of(tensor.bfloat16())
    assert fingerprint.of(tensor[7:], 7, torch.bfloat16) == fingerprint.of(tensor.bfloat16()[7:], 7)
    assert fingerprint.of(tensor) != fingerprint.of(tensor.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [64, 1 << 18])
def test_evenly_strided_tensors_are_read_in_order(dtype, number):
    values = torch.arange(number, dtype=torch.float32).to(dtype)
    for tensor in (values[::2], values[:1].expand(number), values.view(8, -1)[:, ::2]):
        assert fingerprint.of(tensor) == by_definition(as_bytes(tensor))
