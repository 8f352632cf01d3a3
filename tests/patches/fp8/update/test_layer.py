"""What a layer leaves out: snapshots where nothing is processed, copies that no handle points into, NaN sought twice."""

import fp8_toys as toys
import pytest
import torch
from fp8_toy_methods import Method

from flashpatch.patches.fp8.update import layer

A, B = toys.checkpoint(0), toys.checkpoint(1)


def processes(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), Method) or isinstance(module, toys.Attention)


def test_what_nothing_processes_is_updated_without_a_snapshot(atomic, monkeypatch):
    engine = toys.engine("bare", atomic=atomic, processes=processes)
    places, snapshots, compared = toys.state(engine.model), [], []
    process, compare = layer.Layer.process, layer.compare
    monkeypatch.setattr(layer, "compare", lambda name, *a: compared.append(name) or compare(name, *a))
    monkeypatch.setattr(
        layer.Layer, "process", lambda self, *a: snapshots.append(self.name) or process(self, *a)
    )
    assert engine.takes(B, "bare")
    assert toys.same_places(places, toys.state(engine.model))
    assert snapshots and not any("norm" in name for name in snapshots)
    # nor is what post-processing leaves as it was built compared
    assert compared and not any("down" in name for name in compared)


def test_a_parameter_that_the_engine_has_taken_away_is_put_back_as_by_a_snapshot(atomic):
    engine = toys.engine(atomic=atomic, processes=processes)
    norm = engine.model.layers[0].norm
    norm._parameters["weight"] = None
    engine.update(B)
    assert torch.equal(norm.weight, dict(B)["layers.0.norm.weight"])


@pytest.mark.parametrize("borrows", [True, False])
def test_only_what_a_handle_may_point_into_stays_in_memory(borrows, atomic):
    engine = toys.engine("handled", atomic=atomic, borrows=lambda module: borrows)
    for weights in (B, A):
        assert engine.takes(weights, "handled")
    assert any(layer._kept_alive for layer in engine.managed.layers) == borrows
