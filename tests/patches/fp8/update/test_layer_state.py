"""Python state snapshot and put back, and what belongs to one layer alone."""

import functools

import pytest
import torch
from torch import nn

from flashpatch.patches.fp8.update import process as layer_state
from flashpatch.patches.fp8.update.process import LayerState


class Kernel:
    def __init__(self, value):
        self.value = value

    def run(self):
        return self.value


def closure(tensor):
    return lambda: tensor


def module(**attributes) -> nn.Module:
    made = nn.Module()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def test_everything_is_put_back_in_place():
    one, two = torch.ones(1), torch.zeros(1)
    layer = module(
        kernel=Kernel([one]),
        call=closure(one),
        table={"a": {"b": one}},
        many={1, 2},
        deep=(1, [one]),
        part=functools.partial(closure(one), 3),
        method=Kernel(one).run,
        weight=nn.Parameter(one.clone(), requires_grad=False),
    )
    layer.register_buffer("buffer", one)
    held = {key: value for key, value in vars(layer).items()}
    parameters, weight = layer._parameters, layer.weight
    snapshot = LayerState([[layer]], []).capture([layer])
    for change in (
        lambda: layer.kernel.value.__setitem__(slice(None), [two, two]),
        lambda: [setattr(layer.kernel, "extra", two), setattr(layer.method.__self__, "value", two)],
        lambda: [setattr(one.__closure__[0], "cell_contents", two) for one in (layer.call, layer.part.func)],
        lambda: [layer.table["a"].clear(), layer.deep[1].append(two)],
        lambda: layer.many.add(3),
        lambda: layer._parameters.update(weight=two),
        lambda: layer._parameters.update(more=None),
        lambda: layer._buffers.update(buffer=two),
        lambda: layer._non_persistent_buffers_set.add("buffer"),
        lambda: setattr(layer, "call", None),
        lambda: setattr(layer, "new", None),
        layer.eval,
    ):
        assert snapshot.holds() and snapshot.holds([layer])
        change()
        values_alone = layer._parameters.keys() == {"weight"} and (layer.weight is two or not layer.training)
        assert not snapshot.holds() and snapshot.holds([layer]) == values_alone
        snapshot.restore()
    assert {key: value for key, value in vars(layer).items()} == held
    assert layer._parameters is parameters and layer.weight is weight and layer.buffer is one
    assert layer.kernel.value == [one] and not hasattr(layer.kernel, "extra")
    assert layer.call() is one and layer.table == {"a": {"b": one}} and layer.many == {1, 2}
    assert layer.deep[1] == [one] and layer.part.func() is one and layer.method() is one


def test_an_empty_cell_stays_empty():
    def outer():
        def inner():
            return later

        snapshot = LayerState([[module(inner=inner)]], []).capture([module(inner=inner)])
        snapshot.restore()
        with pytest.raises(NameError):
            inner()
        later = 4
        return inner()

    assert outer() == 4


def test_what_layers_share_belongs_to_none():
    shared, own = Kernel(1), Kernel(2)
    a, b = module(kernel=shared, own=own), module(kernel=shared)
    containers = [c for c, _ in LayerState([[a], [b]], []).capture([a]).contents.values()]
    assert any(c is own for c in containers) and not any(c is shared for c in containers)


def test_cycles_end():
    layer = module(kernel=Kernel(None))
    layer.kernel.value = {"back": layer.kernel, "up": [layer]}
    containers = layer_state.held_containers([layer])
    assert len({id(c) for c in containers}) == len(containers)


@pytest.mark.parametrize(
    "name,foreign", [("re", True), ("reloading", False), ("enum", True), ("vllm.configs", False)]
)
def test_foreign_modules_are_those_of_that_very_name(name, foreign):
    kind = type("Kernel", (Kernel,), {"__module__": name})
    assert layer_state.holds_state(kind(1)) is not foreign
