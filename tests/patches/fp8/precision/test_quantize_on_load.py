"""Rounding before loaders: what reaches them, and the error that is noted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration.profile_file import Profile
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.precision import quantize, quantize_on_load


class Fused(torch.nn.Module):
    """Two matrices in one int8 parameter, loaded by shard, as vLLM's merged layers do."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 8, dtype=dtype), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(6, 1), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(8))
        self.weight.weight_loader = self.weight_scale.weight_loader = self.load

    def load(self, parameter: Any, loaded: torch.Tensor, shard_id: int) -> str:
        parameter.data.narrow(0, 3 * shard_id, 3).copy_(loaded)
        return "done"


@pytest.fixture(autouse=True)
def channels(monkeypatch) -> None:
    monkeypatch.setattr(
        quantize_on_load, "_granularity", lambda scales: None if scales is None else "channel"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_wide_value_goes_on_as_values_and_scales(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(Fused(dtype))
    found = quantize_on_load.Rounding(model)
    w = torch.randn(3, 8, dtype=torch.bfloat16)
    assert model[0].weight.weight_loader(model[0].weight, w, 1) == "done"
    q, scale = quantize.quantized(w, "int8" if dtype is torch.int8 else "fp8")
    assert torch.equal(model[0].weight[3:].float(), q.float()) and torch.equal(
        model[0].weight_scale[3:], scale
    )
    assert not model[0].weight[:3].float().any() and not model[0].weight_scale[:3].any()
    assert found.weights == 1 and list(found.errors) == ["0[1]"] and 0 < found.errors["0[1]"] < 0.1


def test_what_is_in_8_bits_passes_as_it_is() -> None:
    layer = Fused()
    found = quantize_on_load.Rounding(layer)
    q = torch.randint(-127, 128, (3, 8), dtype=torch.int8)
    layer.weight.weight_loader(layer.weight, q, shard_id=0)
    assert torch.equal(layer.weight[:3], q) and not layer.weight_scale.any() and not found.errors


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    layer = torch.nn.Module()
    layer.experts = Fused()
    del layer.experts.weight_scale
    quantize_on_load.Rounding(layer)
    with pytest.raises(PatchError, match=r"experts\.weight is int8 of Fused.*for experts use fp8 or bf16"):
        layer.experts.weight.weight_loader(layer.experts.weight, torch.randn(3, 8), 0)
    good = Fused()
    quantize_on_load.Rounding(good)
    with pytest.raises(PatchError, match=r"weight: a weight holds NaN or Inf"):
        good.weight.weight_loader(good.weight, torch.full((3, 8), torch.inf), 0)
    assert not good.weight.any()


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 16),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from(["channel", "tensor"]),
    st.integers(0, 9),
)
def test_the_error_is_within_the_formats_bound(
    rows: int, columns: int, form: str, granularity: str, seed: int
) -> None:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, scale = quantize.quantized(w, form, granularity)
    error = quantize_on_load.relative_error(w, q, scale)
    taken = w[:: -(-rows // 64)].float()
    if form == "int8":  # half a step per value
        step = scale[:: -(-rows // 64)] if granularity == "channel" else scale
        bound = float((step.expand_as(taken) / 2).norm() / taken.norm())
    else:  # 2^-4 of the value, and half the smallest step
        bound = 2**-4 + float(scale.max() * 2**-10 * taken.numel() ** 0.5 / taken.norm())
    assert 0 <= error <= bound * 1.001
    assert error == pytest.approx(quantize_on_load.expected_error(w, form, granularity), rel=1e-5, abs=1e-8)


def test_an_outlier_makes_the_error_grow() -> None:
    w = torch.randn(64, 64)
    before = quantize_on_load.expected_error(w, "int8", "channel")
    w[:, 0] *= 30
    w[:, 1:] /= 30  # the energy is in one column, the rest falls below a step
    assert (
        quantize_on_load.relative_error(
            torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1)
        )
        == 0
    )
    assert quantize_on_load.expected_error(torch.cat([w, w]), "int8", "tensor") > 0
    spread = torch.randn(64, 64)
    spread[:, 0] *= 8
    assert quantize_on_load.expected_error(spread, "int8", "channel") > 1.5 * before


def _profile() -> Profile:
    return Profile(
        "int8",
        "channel",
        "prompts",
        "",
        {"norm.weight": (8,), "up.weight": (3, 8)},
        (Exchange("norm", 0.0, ("up",)),),
        {"norm": torch.full((8,), 2.0)},
        frozenset({"up.weight"}),
    )


def test_a_stream_is_smoothed_on_the_way_and_a_templates_first_load_is_not() -> None:
    items = [("norm.weight", torch.ones(8)), ("up.weight", torch.ones(3, 8))]
    plain = quantize_on_load.Rounding(Fused(), _profile())
    got = dict(plain.prepared(items, first=True))
    assert (got["norm.weight"] == 0.5).all() and (got["up.weight"] == 2).all()
    template = quantize_on_load.Rounding(Fused(), _profile(), at_load=False)
    assert template.prepared(items, first=True) is items
    assert (dict(template.prepared(items, first=False))["up.weight"] == 2).all()
    rounded = [items[0], ("up.weight", torch.ones(3, 8, dtype=torch.int8))]
    with pytest.raises(PatchError, match="up.weight is in 8 bits already"):
        list(template.prepared(rounded, first=False))


class Experts(torch.nn.Module):
    """Loaders as vLLM's experts have: called by keyword, under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.int8), requires_grad=False)
        self.w_scale = torch.nn.Parameter(torch.zeros(6, 1), requires_grad=False)
        self.w.weight_loader = self.w_scale.weight_loader = self.load

    def load(self, param: Any, loaded_weight: torch.Tensor, shard_id: str, expert_id: int = 0) -> str:
        param.data.narrow(0, 3 * expert_id, 3).copy_(loaded_weight)
        return shard_id


def test_a_loader_keeps_its_signature() -> None:
    plain, layer = Experts(), Experts()
    quantize_on_load.Rounding(layer)
    assert inspect.signature(layer.w.weight_loader) == inspect.signature(plain.w.weight_loader)
    q = torch.randint(-127, 128, (3, 8), dtype=torch.int8)
    for positional, named in (
        ((layer.w, q, "w1"), {}),
        ((layer.w, q), dict(shard_id="w1")),
        ((), dict(param=layer.w, loaded_weight=q, shard_id="w1")),
        ((layer.w,), dict(loaded_weight=q, shard_id="w1")),
    ):
        layer.w.data.zero_()
        assert layer.w.weight_loader(*positional, **named) == "w1" and torch.equal(layer.w[:3], q)
    wide = torch.randn(3, 8)
    layer.w.weight_loader(param=layer.w, loaded_weight=wide, shard_id="w1", expert_id=1)
    assert torch.equal(layer.w[3:], quantize.quantized(wide, "int8")[0]) and layer.w_scale[3:].all()


def test_experts_are_refused_before_anything_loads() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.zeros(2, 4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(PatchError, match=r"experts in int8 .*: experts is int8\."):
        quantize_on_load.for_model(model, {"profile": "", "at_load": True})
    quantize_on_load.for_model(model, {"profile": "", "at_load": False})  # a template brings them in 8 bits
