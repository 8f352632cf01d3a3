"""What a layer leaves out: snapshots where nothing is processed, copies that no handle points into, NaN sought twice."""

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys
from fp8_toy_methods import Method

from flashpatch.patches.fp8.refit import layer

A, B = toys.checkpoint(0), toys.checkpoint(1)


def processes(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), Method) or isinstance(module, toys.Attention)


def test_what_nothing_processes_is_updated_without_a_snapshot(atomic, monkeypatch):
    engine = toys.engine(atomic=atomic, processes=processes)
    places, snapshots = toys.state(engine.model), []
    process = layer.Layer.process
    monkeypatch.setattr(
        layer.Layer, "process", lambda self, *a: snapshots.append(self.name) or process(self, *a)
    )
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))
    assert toys.same_places(places, toys.state(engine.model))
    assert snapshots and not any("norm" in name for name in snapshots)


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
        engine.update(weights)
        assert toys.same_answers(engine.model, toys.fresh("handled", weights))
    assert any(layer._kept_alive for layer in engine.managed.layers) == borrows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_sum_hides_what_is_not_finite(dtype, value):
    values = torch.ones(1000, dtype=dtype)
    values[500] = value
    assert not layer._finite(values)
    values[501] = -value  # infinities of both signs
    assert not layer._finite(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_beyond_the_range_of_its_type_is_looked_at_again(dtype):
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.isfinite(values.sum()) and layer._finite(values)
