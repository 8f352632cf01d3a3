"""SGLang's int8 models take bf16 weights through a ``load_weights`` that is called as the model's own is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")

import fp8_toys

from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import quantize_on_load


class Int8(torch.nn.Module):
    """One int8 layer, whose checkpoint brings values and scales under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(4, 1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            params[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def test_load_weights_is_called_by_position_and_by_keyword() -> None:
    model = Int8()
    managed = fp8_toys.manage(model)
    model_registry.add(model, managed)
    within = model.load_weights
    model.load_weights = quantize_on_load.quantizing(managed, within)
    assert inspect.signature(model.load_weights) == inspect.signature(within)
    q = torch.randint(-127, 128, (4, 8), dtype=torch.int8)
    model.load_weights(weights=[("weight", q), ("weight_scale", torch.ones(4, 1))])
    managed.end_first_load()
    for seed, by_keyword in enumerate((False, True)):
        w = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        bucket = [("weight", w)]
        got = model.load_weights(weights=bucket) if by_keyword else model.load_weights(bucket)
        managed.finish()
        assert got == {"weight", "weight_scale"} and managed.version == seed + 1
        assert all(map(torch.equal, (model.weight, model.weight_scale), quantize.quantized(w, "int8")))
    w = torch.randn(4, 8)
    model.load_weights([("weight", w)], partial=True)
    assert managed.version == 3 and torch.equal(model.weight, quantize.quantized(w, "int8")[0])
