"""Which weights may come rounded to bf16: seen by the writes of loaders, and true of the bytes that they leave."""

import fp8_toys as toys
import pytest
import torch

from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.precision import quantize, quantize_on_load

BIASES = ["layers.0.norm.bias", "layers.1.norm.bias"]


def bf16(model: torch.nn.Module) -> torch.nn.Module:
    """The model as an engine makes it in bf16, with biases of norms in float32."""
    model.to(torch.bfloat16)
    for block in model.layers:
        block.norm.bias = block.norm.bias.float()
    return model


class ByName(toys.Model):
    """Its loader sorts the weights first, so which came last says nothing."""

    def load_weights(self, weights):
        return super().load_weights(sorted(weights, key=lambda item: item[0]))


class Computing(toys.Model):
    """Its loader writes what it has computed."""

    def load_weights(self, weights):
        return super().load_weights((name, tensor * 0.5) for name, tensor in weights)


def updated(kind: type[toys.Model], weights: list) -> toys.Engine:
    engine = toys.Engine(bf16(kind()), toys.checkpoint(0))
    engine.update(weights)
    return engine


def test_what_is_held_in_float32_is_named_and_all_else_may_come_in_bf16() -> None:
    weights = toys.checkpoint(1)
    whole = updated(toys.Model, weights)
    assert model_registry.wide_names([whole.managed.wide]) == BIASES
    cast = [(name, tensor if name in BIASES else tensor.bfloat16()) for name, tensor in weights]
    narrow = updated(toys.Model, cast)
    assert toys.same_bits(toys.state(whole.model), toys.state(narrow.model))
    narrow.update(weights)
    narrow.update(cast)
    assert model_registry.wide_names([narrow.managed.wide]) == BIASES  # what was seen is not forgotten


@pytest.mark.parametrize("kind", [ByName, Computing])
def test_a_loader_that_cannot_be_followed_says_so(kind: type[toys.Model]) -> None:
    assert model_registry.wide_names([updated(kind, toys.checkpoint(1)).managed.wide]) is None
    followed = updated(toys.Model, toys.checkpoint(1)).managed.wide
    assert model_registry.wide_names([followed, updated(kind, toys.checkpoint(1)).managed.wide]) is None


class Int8(torch.nn.Module):
    """A matrix in int8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.int8), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.float32), requires_grad=False)
        self.weight_scale.quant_method = "channel"
        self.weight.weight_loader = self.weight_scale.weight_loader = lambda to, value: to.data.copy_(value)


@pytest.fixture
def in_bf16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_float32_weight_is_cast_to_the_models_dtype_before_it_is_rounded(in_bf16: None) -> None:
    w = torch.randn(6, 8, dtype=torch.float32)
    layers = []
    for value in (w, w.bfloat16()):
        layers.append(Int8())
        quantize_on_load.Rounding(layers[-1])
        layers[-1].weight.weight_loader(layers[-1].weight, value)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[0].weight_scale, layers[1].weight_scale)
    assert not torch.equal(quantize.quantized(w, "int8")[1], layers[1].weight_scale)  # as it was before
