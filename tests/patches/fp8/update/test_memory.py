"""Memory of staged tensors and of models that are gone."""

import copy
from types import SimpleNamespace

import fp8_toys as toys
import pytest
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.update.model import ManagedModel

A, B = toys.checkpoint(0), toys.checkpoint(1)


@pytest.mark.parametrize(
    "method,atomic", [("handled", "layer"), ("quantized", "layer"), ("cached", "model"), ("closure", "model")]
)
def test_no_growth_over_many_updates(method, atomic):
    weights = [toys.checkpoint(seed, blocks=1) for seed in range(3)]
    engine = toys.Engine(toys.Model(method, blocks=1), weights[0], atomic=atomic)
    for update in range(50):
        for bucket in toys.cut(weights[update % 3], 5):
            engine.load(bucket)
        engine.managed.finish()
        if update == 3:
            count = toys.tensors()
    assert toys.tensors() <= count


def test_staged_memory_is_one_layers_at_a_time():
    engine = toys.engine("bare")
    staged = [param for layer in engine.managed.layers for param in layer.params]
    held = []

    def stream():
        for item in B:
            held.append(sum(param.storage.get().nbytes() for param in staged))
            yield item

    engine.load(stream())
    largest = max(param.storage.nbytes for param in staged)
    assert max(held) <= largest + 2 * 4 * toys.HIDDEN
    engine.managed.finish()


@pytest.mark.parametrize("atomic,times", [("model", 1), ("layer", 0)])
@pytest.mark.parametrize("ends", [True, False])
def test_the_memory_of_a_second_model_is_given_back(monkeypatch, atomic, times, ends):
    """An accelerator's allocator keeps what is freed, and a KV cache that is woken by the driver does not get it."""
    engine, left = toys.engine("quantized", atomic=atomic), []
    update = engine.managed._update
    update._adapter = copy.copy(update._adapter)
    update._adapter.device = torch.device("cuda")
    staged = [param for layer in engine.managed.layers for param in layer.params]

    def empty_cache():
        left.append(
            sum(layer.came.plan is not None for layer in update._layers)
            + sum(param.storage.get().nbytes() for param in staged)
        )

    standin = SimpleNamespace(empty_cache=empty_cache, current_stream=torch.cpu.current_stream)
    monkeypatch.setattr(torch, "get_device_module", lambda of: standin)
    engine.load(B[:-1])
    assert not left
    if ends:
        engine.load(B[-1:])
        engine.managed.finish()
    else:
        with pytest.raises(PatchError):
            engine.load([(B[-1][0], B[-1][1] * float("nan"))])
    assert left == [0] * times


def test_temporaries_of_a_loader_are_not_taken_for_staged_tensors():
    """A loader's scratch tensor may get the storage identity of a staged tensor that has just been let go."""

    class Scratch(toys.Model):
        def load_weights(self, weights):
            for name, tensor in weights:
                super().load_weights([(name, tensor)])
                keep = [torch.empty(4).copy_(torch.ones(4)) for _ in range(30)]
                del keep

    engine = toys.Engine(Scratch("bare"), A)
    assert engine.takes(B, "bare")


def test_an_engine_that_is_gone_is_forgotten():
    from flashpatch.patches.fp8 import model_registry

    before = len(model_registry.all_models())
    model = toys.Model()
    model_registry.add(model, toys.manage(model))
    assert (
        isinstance(model_registry.get(model), ManagedModel) and len(model_registry.all_models()) == before + 1
    )
    model.load_weights(A)
    toys.process_all(model)
    model_registry.end_first_loads()
    model.load_weights(B)
    assert model_registry.get(model).state == "open"
    del model
    toys.tensors()
    assert len(model_registry.all_models()) == before
