"""The arithmetic of 8 bits, against float64 and against the bounds its module states."""

import profile_lab
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.fp8.calibration.profile_file import Profile
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.precision import quantize

FORMS = ("int8", "fp8")
GRANULARITIES = ("channel", "tensor")


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(shape[0], 1, generator=generator))
    return torch.randn(shape, generator=generator) * rows


def bound(scale: torch.Tensor, w: torch.Tensor, form: str) -> torch.Tensor:
    """The largest error that the module's first paragraph allows, and float32's own rounding."""
    own = 2.0**-22 * w.abs()
    if form == "int8":
        return scale.double() / 2 + own
    return torch.maximum(w.abs() * 2.0**-4, scale.double() * 2.0**-10) + own


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("form", FORMS)
class TestWeights:
    @given(seed=st.integers(0, 10**6), out=st.integers(1, 20), inn=st.integers(1, 40), spread=st.floats(0, 6))
    @settings(max_examples=40)
    def test_error_is_within_the_bound(self, form, granularity, seed, out, inn, spread) -> None:
        w = random(out, inn, seed=seed, spread=spread)
        q, scale = quantize.quantized(w, form, granularity)
        assert q.dtype == quantize.DTYPES[form] and q.shape == w.shape
        assert scale.dtype == torch.float32 and scale.shape == ((out if granularity == "channel" else 1), 1)
        error = (q.double() * scale.double() - w.double()).abs()
        assert bool((error <= bound(scale, w.double(), form)).all())

    def test_the_full_range_is_used_and_never_left(self, form, granularity) -> None:
        q, _ = quantize.quantized(random(32, 64, spread=3), form, granularity)
        assert q.double().abs().max() == quantize.LARGEST[q.dtype]
        assert q.double().min() >= -quantize.LARGEST[q.dtype]

    def test_all_zero(self, form, granularity) -> None:
        q, scale = quantize.quantized(torch.zeros(3, 4), form, granularity)
        assert bool((q.float() == 0).all()) and bool((scale == 1).all())

    @pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38])
    def test_extremes_stay_finite(self, form, granularity, value: float) -> None:
        w = torch.tensor([[value, -value / 3, 0.0]])
        q, scale = quantize.quantized(w, form, granularity)
        back = q.double() * scale.double()
        assert bool(torch.isfinite(back).all()) and bool((scale > 0).all())
        assert float((back - w.double()).abs().max()) <= max(
            value, float(torch.finfo(torch.float32).tiny) * 448
        )

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_a_scale_tells_what_is_not_finite(self, form, granularity, value: float) -> None:
        w = random(4, 4)
        w[2, 1] = value
        _, scale = quantize.quantized(w, form, granularity)
        assert scale.isfinite().flatten().tolist() == (
            [True, True, False, True] if granularity == "channel" else [False]
        )

    def test_values_are_those_of_one_step_after_the_other(self, form, granularity) -> None:
        w = random(64, 300, spread=6).bfloat16()
        w[3], w[5] = 0, w[5] * 1e-38
        largest, amax = quantize.LARGEST[quantize.DTYPES[form]], w.float().abs().amax(1, keepdim=True)
        amax = amax if granularity == "channel" else amax.max().view(1, 1)
        steps = torch.where(amax > 0, (amax / largest).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
        values = (w.float() / steps).clamp(-largest, largest)
        values = (values.round() if form == "int8" else values).to(quantize.DTYPES[form])
        q, scale = quantize.quantized(w, form, granularity)
        assert torch.equal(q.view(torch.int8), values.view(torch.int8)) and torch.equal(scale, steps)


class TestSmoothed:
    WEIGHTS = {
        "m.norm.weight": random(8, 1)[:, 0],
        "m.a.weight": random(6, 8, seed=1),
        "m.a.bias": random(1, 6, seed=2)[0],
        "m.b.weight": random(8, 6, seed=3),
        "m.head.weight": random(4, 8, seed=4),
    }

    def profile(self) -> Profile:
        exchanges = (Exchange("m.norm", 0.0, ("m.a",)), Exchange("m.a", None, ("m.b",)))
        smooth = {
            "m.norm": random(8, 1, seed=5)[:, 0].abs() + 0.1,
            "m.a": random(6, 1, seed=6)[:, 0].abs() + 0.1,
        }
        shapes = {name: tuple(w.shape) for name, w in self.WEIGHTS.items()}
        return Profile(
            "int8", "channel", "", shapes, exchanges, smooth, frozenset({"m.a.weight", "m.b.weight"})
        )

    @pytest.mark.parametrize("form", FORMS)
    def test_against_float64(self, form: str) -> None:
        """norm(x) a b, rounded, equals the same from the smoothed float64 weights within the bound."""
        profile = self.profile()
        made = profile_lab.rounded(self.WEIGHTS.items(), profile, form)
        w = {name: tensor.double() for name, tensor in self.WEIGHTS.items()}
        s, t = profile.smooth["m.norm"].double(), profile.smooth["m.a"].double()
        wanted = {
            "m.norm.weight": w["m.norm.weight"] / s,
            "m.a.weight": w["m.a.weight"] * s / t[:, None],
            "m.a.bias": w["m.a.bias"] / t,
            "m.b.weight": w["m.b.weight"] * t,
            "m.head.weight": w["m.head.weight"],
        }
        assert set(made) == set(wanted) | {"m.a.weight_scale", "m.b.weight_scale"}
        for name, exact in wanted.items():
            if f"{name}_scale" in made:
                scale = made[f"{name}_scale"]
                assert made[name].dtype == quantize.DTYPES[form] and scale.shape == (exact.shape[0], 1)
                error = (made[name].double() * scale.double() - exact).abs()
                assert bool((error <= bound(scale, exact, form) + 1e-6 * exact.abs().max()).all())
            else:
                assert torch.allclose(made[name].double(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_of_a_row_is_found_by_its_bits(dtype) -> None:
    w = random(3000, 257, spread=3).to(dtype)
    w[1], w[2, 3], w[4, 5], w[6, 0] = -0.0, float("-inf"), float("nan"), torch.finfo(dtype).tiny
    for one in (w, w.t(), w.view(10, 300, 257), w[:0]):
        found, expected = quantize.row_amax(one), one.float().abs().amax(-1, keepdim=True)
        assert found.dtype == torch.float32 and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_an_accelerator_rounds_in_large_blocks() -> None:
    """Each block costs launches there; torch finds the extremes by itself."""
    rows, here = (
        torch.empty(1 << 13, 1 << 13, dtype=torch.bfloat16, device=device) for device in ("meta", "cpu")
    )
    assert quantize.rows_at_once(rows) == quantize.ON_DEVICE >> 13 > 16 * quantize.rows_at_once(here)
    assert quantize.row_amax(rows).shape == (1 << 13, 1)
