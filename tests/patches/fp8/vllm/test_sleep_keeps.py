"""What outlives a sleep of level 2 beside what an update brings, on toy models in the emulated pool."""

import types
from typing import Any

import fp8_toys as toys
import pytest
import torch
from sleep_pool import SleepPool

from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.vllm import worker as vllm_worker


class Table(torch.nn.Module):
    """A parameter of ``numel`` elements that the constructor sets and no checkpoint has."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(0, 1, numel), requires_grad=False)


class Runner:
    """What owns the models of one engine."""


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_fails_leaves_the_engine_awake(level: int) -> None:
    """The host has no memory for the copies: updates were refused as if it slept."""
    runner = Runner()
    with model_registry.owned_by(runner):
        engine = toys.engine("quantized")
        model_registry.add(engine.model, engine.managed)
    worker = types.SimpleNamespace(model_runner=runner)

    def fails(worker: Any, level: int) -> None:
        raise MemoryError("no memory for the copies")

    with pytest.raises(MemoryError):
        vllm_worker.worker_sleep(fails, worker, level)
    assert not engine.managed.asleep and runner not in vllm_worker._saved
    engine.model.load_weights(toys.checkpoint(1))
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("quantized", toys.checkpoint(1)))


def test_parameters_that_no_checkpoint_brings_come_back() -> None:
    pool, runner = SleepPool(), Runner()
    with pool.use_memory_pool("weights"), model_registry.owned_by(runner):
        model = toys.Model("quantized")
        model.small, model.large = Table(8), Table(1 << 15)  # of the large one no initial values are kept
        model.embed.position = torch.nn.Parameter(torch.linspace(0, 1, 1 << 15), requires_grad=False)
        engine = toys.Engine(model, toys.checkpoint(0))
        model_registry.add(model, engine.managed)
    worker = types.SimpleNamespace(model_runner=runner)
    for seed in (1, 2):  # the pool spoils with NaN, then with a finite number
        vllm_worker.worker_sleep(lambda worker, level: pool.sleep(kept=()), worker, 2)
        vllm_worker.worker_wake_up(lambda worker, tags: pool.wake_up(), worker)
        model.load_weights(toys.checkpoint(seed))
        engine.managed.finish()
        assert toys.same_answers(model, toys.fresh("quantized", toys.checkpoint(seed)))
        found: dict[str, Any] = {
            "small": model.small.table,
            "large": model.large.table,
            "position": model.embed.position,
        }
        for name, tensor in found.items():
            assert torch.equal(tensor, torch.linspace(0, 1, tensor.numel())), name
