"""What post-processing sets for some policies alone, and what it leaves on tensors themselves, follow every update."""

import fp8_toy_methods
import fp8_toys as toys
import pytest
import torch
from torch import nn

from flashpatch.errors import PatchError


def positive(layer: nn.Module) -> bool:
    return bool(layer.weight.detach()[0, 0] > 0)


class SomeAttribute(fp8_toy_methods.Method):
    def process(self, layer):
        if positive(layer):
            layer.extra = layer.weight.detach().sum().clone()

    def apply(self, layer, x):
        return x @ layer.weight.T + getattr(layer, "extra", 0.0)


class SomeKey(fp8_toy_methods.Method):
    def __init__(self) -> None:
        self.kernel = fp8_toy_methods.Kernel()

    def process(self, layer):
        self.kernel.cache = {"weight": [layer.weight.detach().T.contiguous()]}
        if positive(layer):
            self.kernel.cache["extra"] = [layer.weight.detach().sum().clone()]

    def apply(self, layer, x):
        return x @ self.kernel.cache["weight"][0] + self.kernel.cache.get("extra", [0.0])[0]


class SomeBuffer(fp8_toy_methods.Method):
    def process(self, layer):
        if positive(layer):
            layer.register_buffer("cache", 2 * layer.weight.detach().T.contiguous(), persistent=False)

    def apply(self, layer, x):
        cache = getattr(layer, "cache", None)
        return x @ layer.weight.T if cache is None else x @ cache


class OnDefaultDevice(fp8_toy_methods.Method):
    """As vLLM's attention, which sets constants of its scales anew on whatever the default device is."""

    def process(self, layer):
        layer.extra = torch.tensor(2.0)

    def apply(self, layer, x):
        return x @ layer.weight.T + layer.extra


class Flag(fp8_toy_methods.Method):
    def __init__(self) -> None:
        self.doubled = False

    def process(self, layer):
        self.doubled = positive(layer)

    def apply(self, layer, x):
        return x @ layer.weight.T * (2.0 if self.doubled else 1.0)


class OnParameter(fp8_toy_methods.Method):
    def process(self, layer):
        layer.weight.power_of_two = positive(layer)

    def apply(self, layer, x):
        return x @ layer.weight.T * (2.0 if layer.weight.power_of_two else 1.0)


class SomeOnParameter(fp8_toy_methods.Method):
    def process(self, layer):
        if positive(layer):
            layer.weight.extra = layer.weight.detach().sum().clone()

    def apply(self, layer, x):
        return x @ layer.weight.T + getattr(layer.weight, "extra", 0.0)


class Scaled(torch.Tensor):
    """As torchao's subclasses: what its values mean is a number of Python."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values"], {"scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].values, args[0].scale)


class Subclass(fp8_toy_methods.Method):
    def process(self, layer):
        scale = float(layer.weight.detach().abs().max())
        layer.weight = nn.Parameter(Scaled(layer.weight.detach() / scale, scale), requires_grad=False)

    def apply(self, layer, x):
        return x @ layer.weight.values.T * layer.weight.scale


METHODS = {
    cls.__name__: cls
    for cls in (
        SomeAttribute,
        SomeKey,
        SomeBuffer,
        Flag,
        OnDefaultDevice,
        OnParameter,
        SomeOnParameter,
        Subclass,
    )
}


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    for name, method in METHODS.items():
        monkeypatch.setitem(fp8_toy_methods.METHODS, name, method)


def policy(seed: int, sign: int) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint whose matrices all begin with a value of this sign."""
    weights = toys.checkpoint(seed)
    for _, tensor in weights:
        first = tensor.view(-1)[0]
        first.copy_(sign * first.abs())
    return weights


@pytest.mark.parametrize("atomic", ["layer", "model"])
@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize("method", METHODS)
def test_every_update_is_as_a_fresh_load(method, first, atomic):
    policies = [policy(number, first * (-1) ** number) for number in range(4)]
    engine = toys.Engine(toys.Model(method), policies[0], atomic=atomic)
    for weights in policies[1:]:
        assert engine.takes(weights, method)


def test_an_update_inside_of_a_device_is_as_a_fresh_load():
    """vLLM's own weight transfer calls the loader so; an engine processes what it loads outside of any."""
    engine = toys.Engine(toys.Model("OnDefaultDevice"), policy(0, 1))
    weights = policy(1, 1)
    with torch.device("meta"):
        engine.update(weights)
    assert toys.same_answers(engine.model, toys.fresh("OnDefaultDevice", weights))


@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize("method", METHODS)
def test_a_refused_update_leaves_it_as_it_was(method, first):
    engine = toys.Engine(toys.Model(method), policy(0, first), atomic="model")
    broken = toys.Attention.process

    def fail(self):
        raise RuntimeError("no memory")

    toys.Attention.process = fail
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            engine.update(policy(1, -first))
    finally:
        toys.Attention.process = broken
    assert toys.same_answers(engine.model, toys.fresh(method, policy(0, first)))
    assert engine.takes(policy(2, -first), method)


@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize("method", ["SomeAttribute", "SomeKey", "SomeBuffer", "SomeOnParameter"])
def test_graphs_refuse_a_tensor_that_comes_or_goes(method, first):
    engine = toys.Engine(toys.Model(method), policy(0, first), atomic="model", compiled=lambda: True)
    engine.update(policy(1, first))
    with pytest.raises(PatchError, match="exists with some weights only"):
        engine.update(policy(2, -first))
    assert toys.same_answers(engine.model, toys.fresh(method, policy(1, first)))


@pytest.mark.parametrize("seed", [0, None], ids=["loaded", "dummy"])
def test_what_others_set_on_a_layer_stays(seed):
    """As an engine gives an attention layer its KV cache, in the place of an empty tensor."""
    model = toys.Model("SomeAttribute")
    layer = model.layers[0].qkv
    layer.kv_cache = torch.empty(0)
    engine = toys.Engine(model, None if seed is None else toys.checkpoint(seed))
    layer.kv_cache, layer.cache, layer.weight.note = torch.ones(3), torch.ones(1), "kept"
    for seed in (1, 2):
        engine.update(toys.checkpoint(seed))
        assert (
            layer.kv_cache.tolist() == [1, 1, 1] and layer.cache.item() == 1 and layer.weight.note == "kept"
        )


class Bonus(toys.Model):
    """Derives a number in a hook of its own, for some policies alone."""

    def process_weights_after_loading(self):
        if self.layers[0].norm.weight.detach()[0] > 0:
            self.bonus = float(self.layers[0].norm.weight.detach().sum())

    def forward(self, tokens):
        return super().forward(tokens) + getattr(self, "bonus", 0.0)


def processed(model: nn.Module) -> None:
    toys.process_all(model)
    model.process_weights_after_loading()


@pytest.mark.parametrize("atomic", ["layer", "model"])
@pytest.mark.parametrize("first", [1, -1])
def test_a_hook_of_the_model(first, atomic):
    engine = toys.Engine(Bonus(), policy(0, first), processing=processed, atomic=atomic)
    for number in range(1, 4):
        weights = policy(number, first * (-1) ** number)
        engine.update(weights)
        expected = Bonus()
        expected.load_weights(weights)
        processed(expected)
        assert toys.same_answers(engine.model, expected)


class Table(toys.Model):
    """Has a large buffer that checkpoints may bring."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 20_000))

    def forward(self, tokens):
        return super().forward(tokens) + self.table[tokens].unsqueeze(1)


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_a_large_buffer_that_no_update_brings_to_dummy_weights(atomic):
    engine = toys.Engine(Table(), None, atomic=atomic)
    engine.update(toys.checkpoint(1))
    expected = Table()
    expected.load_weights(toys.checkpoint(1))
    toys.process_all(expected)
    assert toys.same_answers(engine.model, expected)
