"""Rounding before loaders: what reaches them, and the error that is noted."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
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
        self.weight_scale.quant_method = "channel"
        self.norm = torch.nn.Parameter(torch.zeros(8))
        self.weight.weight_loader = self.weight_scale.weight_loader = self.load

    def load(self, parameter: Any, loaded: torch.Tensor, shard_id: int) -> str:
        parameter.data.narrow(0, 3 * shard_id, 3).copy_(loaded)
        return "done"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_wide_value_goes_on_as_values_and_scales(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(Fused(dtype))
    quantize_on_load.Rounding(model)
    w = torch.randn(3, 8, dtype=torch.bfloat16)
    assert model[0].weight.weight_loader(model[0].weight, w, 1) == "done"
    q, scale = quantize.quantized(w, "int8" if dtype is torch.int8 else "fp8")
    assert torch.equal(model[0].weight[3:].float(), q.float())
    assert torch.equal(model[0].weight_scale[3:], scale)
    assert not model[0].weight[:3].float().any() and not model[0].weight_scale[:3].any()


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    layer = torch.nn.Module()
    layer.experts = Fused()
    del layer.experts.weight_scale
    quantize_on_load.Rounding(layer)
    with pytest.raises(PatchError, match=r"experts\.weight is int8 of Fused.*use bf16"):
        layer.experts.weight.weight_loader(layer.experts.weight, torch.randn(3, 8), 0)
    good = Fused()
    quantize_on_load.Rounding(good)
    with pytest.raises(PatchError, match=r"weight holds NaN or Inf"):
        good.weight.weight_loader(good.weight, torch.full((3, 8), torch.inf), 0)
    assert not good.weight.any()


@given(
    st.integers(1, 200),
    st.integers(1, 16),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from(["channel", "tensor"]),
    st.integers(0, 9),
)
def test_the_error_is_within_the_formats_bound(rows, columns, form, granularity, seed):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, scale = quantize.quantized(w, form, granularity)
    gap = (w.double() - q.double() * scale.double()).abs()
    # int8: half a step; fp8: 2^-4 of the value, and half the smallest step
    bound = scale / 2 if form == "int8" else 2**-4 * w.double().abs() + scale * 2**-10
    assert (gap <= bound * 1.001).all()


def _profile() -> Profile:
    shapes, exchange = {"norm.weight": (8,), "up.weight": (3, 8)}, Exchange("norm", 0.0, ("up",))
    smooth, quantized = {"norm": torch.full((8,), 2.0)}, frozenset({"up.weight"})
    return Profile("int8", "channel", "", shapes, (exchange,), smooth, quantized)


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
    """Two experts, and loaders as vLLM's have: called by keyword, and told apart by the name of the weight."""

    def __init__(self, cut: str = "channel", local: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        scales = torch.ones(2, 6, 1) if cut == "channel" else torch.ones(2, 2)
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 6, 8, dtype=torch.int8), requires_grad=False)
        self.w13_weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self.w13_weight.weight_loader = self.w13_weight_scale.weight_loader = self.load
        self.w13_weight_scale.quant_method = cut
        self._local, self._cut = local, cut

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return self._local.index(expert_id) if expert_id in self._local else -1

    def load(
        self,
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        expert, shard = (
            self._map_global_expert_id_to_local_expert_id(expert_id),
            "w1 w3".split().index(shard_id),
        )
        if expert == -1:
            return False if return_success else None
        if loaded_weight.dim() == 3:
            param.data[:, 3 * shard : 3 * shard + 3].copy_(loaded_weight)
        elif weight_name.endswith("scale") and self._cut == "tensor":
            param.data[expert, shard] = loaded_weight.reshape(())
        else:
            param.data[expert, 3 * shard : 3 * shard + 3].copy_(loaded_weight)
        return True if return_success else None

    def state(self) -> list[torch.Tensor]:
        return [self.w13_weight.clone(), self.w13_weight_scale.clone()]


NAMES = ("param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success")


def called(loader: Any, values: tuple, first: int) -> Any:
    """Call a loader, with the ``first`` arguments by position and the others by keyword."""
    return loader(*values[:first], **dict(zip(NAMES[first:], values[first:])))


@pytest.mark.parametrize("cut", ["channel", "tensor"])
@pytest.mark.parametrize("tail", [(), (False,), (True,)])
def test_a_loader_keeps_its_signature(cut: str, tail: tuple[bool, ...]) -> None:
    plain = Experts(cut)
    assert inspect.signature(Experts(cut).w13_weight.weight_loader) == inspect.signature(plain.load)
    w = torch.randn(3, 8, dtype=torch.bfloat16)
    q, scale = quantize.quantized(w, "int8", cut)
    for value in (w, q):
        plain = Experts(cut)
        plain.load(plain.w13_weight, q, "experts.w13_weight", "w3", 1)
        if value is w:
            plain.load(plain.w13_weight_scale, scale, "experts.w13_weight_scale", "w3", 1)
        for first in range(6 + len(tail)):
            layer = Experts(cut)
            quantize_on_load.Rounding(layer)
            loader = layer.w13_weight.weight_loader
            assert inspect.signature(loader) == inspect.signature(plain.load)
            arguments = (layer.w13_weight, value, "experts.w13_weight", "w3", 1, *tail)
            assert called(loader, arguments, first) is (True if tail == (True,) else None)
            assert all(map(torch.equal, layer.state(), plain.state())), first


def test_a_call_without_an_argument_fails_as_the_original_does() -> None:
    layer = Experts()
    original = layer.w13_weight.weight_loader
    quantize_on_load.Rounding(layer)
    for args in ((), (layer.w13_weight,), (layer.w13_weight, torch.ones(3, 8, dtype=torch.int8))):
        with pytest.raises(TypeError) as wanted:
            original(*args)
        with pytest.raises(TypeError) as got:
            layer.w13_weight.weight_loader(*args)
        assert str(got.value) == str(wanted.value)
    with pytest.raises(TypeError, match="missing 3 required"):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.randn(3, 8))


def test_experts_of_all_at_once() -> None:
    layer, one_by_one = Experts(), Experts()
    for experts in (layer, one_by_one):
        quantize_on_load.Rounding(experts)
    w = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    layer.w13_weight.weight_loader(layer.w13_weight, w, "w13_weight", "w1", 0)
    for expert in (0, 1):
        one_by_one.w13_weight.weight_loader(one_by_one.w13_weight, w[expert], "w13_weight", "w1", expert)
    assert all(map(torch.equal, layer.state(), one_by_one.state()))


def test_another_ranks_expert_is_not_rounded(monkeypatch) -> None:
    layer = Experts(local=(0, 3))
    quantize_on_load.Rounding(layer)
    monkeypatch.setattr(quantize, "quantized", lambda *args: pytest.fail("rounded for nothing"))
    assert (
        layer.w13_weight.weight_loader(layer.w13_weight, torch.randn(3, 8), "w13_weight", "w1", 1, True)
        is False
    )
    assert not layer.w13_weight.any()


def test_experts_that_cannot_be_rounded_are_refused_before_anything_loads() -> None:
    model = torch.nn.Module()
    model.experts = Experts("block")
    words = r"experts in 8 bits .*: experts\.w13_weight is int8 of Experts"
    with pytest.raises(PatchError, match=words):
        quantize_on_load.for_model(model, {"profile": "", "at_load": True})
    quantize_on_load.for_model(model, {"profile": "", "at_load": False})  # a template brings them in 8 bits
    model.experts = Experts()
    quantize_on_load.for_model(model, {"profile": "", "at_load": True})
