"""The fp8 product on a CPU against float64, on both kinds of CPU, and what it keeps in memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashpatch.patches.fp8.precision import product, quantize
from flashpatch.patches.fp8.precision.product import scaled_mm

FP8 = torch.float8_e4m3fn
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # unit roundoff


@pytest.fixture(params=[False, True], ids=["float32 products", "bfloat16 products"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of CPU on either."""
    monkeypatch.setattr(product, "has_bf16_products", lambda: request.param)
    return request.param


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Codes of activations and weights of all magnitudes that e4m3 has, their scales, and a bias."""
    random = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-12, 8, shape, generator=random)
        return (torch.randn(shape, generator=random) * exponents.float().exp2()).clamp(-448, 448).to(FP8)

    scales = (torch.rand(rows, 1, generator=random) * 1e-2 + 1e-4 for rows in (m, n))
    return codes(m, k), codes(n, k).t(), *scales, torch.randn(n, generator=random)


@pytest.mark.parametrize("dtype", list(U))
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 48, 64), (7, 33, 100), (64, 256, 512), pytest.param(9, 5, 1 << 20, marks=pytest.mark.slow)],
)
def test_within_the_bound_of_float64(fast: bool, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    a, b, a_scale, b_scale, bias = operands(m, n, k)
    found = scaled_mm(a, b, a_scale, b_scale, bias, dtype).double()
    left, right = a.double() * a_scale, b.double() * b_scale.t()
    exact = left @ right
    summed = left.abs() @ right.abs() * min(k * 2.0**-23, 1e-3)  # float32 sums, in any order
    scaled = exact.abs() * 2.0**-22 + bias.abs() * 2.0**-23
    if fast and dtype is torch.bfloat16:
        scaled = scaled + (exact.abs() + summed) * U[dtype]  # sums are rounded before the scales
    bound = summed + scaled + ((exact + bias).abs() + summed + scaled) * U[dtype] + 1e-7
    assert ((found - (exact + bias)).abs() <= bound).all()


@pytest.mark.parametrize("k", [32, 2048])
def test_a_nan_activation_makes_its_row_nan(fast: bool, k: int) -> None:
    a, b, a_scale, b_scale, _ = operands(8, 16, k)
    a.view(torch.uint8)[3, 5] = 0x7F
    found = scaled_mm(a, b, a_scale, b_scale, None, torch.bfloat16)
    assert found[3].isnan().all() and not found[[0, 1, 2, 4, 5, 6, 7]].isnan().any()


def test_layers_share_one_bounded_buffer(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "buffers", product._Buffers())
    largest = operands(16, 1500, 1000)  # more than one block
    scaled_mm(*largest, torch.bfloat16)
    kept = {dtype: flat.data_ptr() for dtype, flat in product.buffers._flat.items()}
    bound = quantize.BLOCK * quantize.THREADS * (6 if fast else 4)
    assert product.buffers.bytes() <= bound and len(kept) == 1 + fast
    for n, k in ((100, 64), (1500, 1000), (5, 3000), (1, 1)):
        scaled_mm(*operands(16, n, k), torch.bfloat16)
    assert {dtype: flat.data_ptr() for dtype, flat in product.buffers._flat.items()} == kept


def test_inference_mode_and_training_share_it_too(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "buffers", product._Buffers())
    given = operands(16, 64, 64)
    with torch.inference_mode():
        first = scaled_mm(*given, torch.bfloat16)
    assert torch.equal(scaled_mm(*given, torch.bfloat16), first)


def test_threads_do_not_disturb_each_other(fast: bool) -> None:
    layers = [operands(8, 64 * (1 + i), 96 + 8 * i, seed=i) for i in range(4)]
    want = [scaled_mm(*layer, torch.bfloat16) for layer in layers]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(scaled_mm(*layers[i], torch.bfloat16), want[i]):
                wrong.append(i)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(4)))
    assert not wrong
