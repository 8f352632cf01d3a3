"""A fault of a running engine that no checkpoint has is named: far out, in decode steps, after some calls; and one expert of many."""

import itertools
from collections.abc import Callable
from typing import Any

import exact_faults
import pytest
import torch
from vllm_lab import models, scenario

pytestmark = pytest.mark.vllm

L0, L1, ROPE = "model.layers.0", "model.layers.1", "model.layers.0.self_attn.rotary_emb"
SOON = ("rotary positions beyond 200 are one less", "steps of two tokens are wrong")
Change = Callable[[torch.Tensor], torch.Tensor]


def _alone(change: Change) -> Change:
    """In decode steps alone."""
    return lambda own: change(own) if len(own) == 1 else own


def _after(count: int, change: Change) -> Change:
    calls = itertools.count()
    return lambda own: change(own) if next(calls) > count else own


FAULTS: dict[str, tuple[str, bool, Change, str]] = {
    "rotary positions beyond 200 are one less": (ROPE, True, lambda at: at - (at > 200).long(), "o_proj"),
    "rotary positions are one less in decode steps": (ROPE, True, _alone(lambda at: at - 1), "o_proj"),
    "a norm is skipped in decode steps": (
        f"{L1}.mlp.gate_up_proj",
        True,
        _alone(lambda x: x * 1.3),
        "gate_up_proj",
    ),
    "attention is less in decode steps": (
        f"{L0}.self_attn.attn",
        False,
        _alone(lambda out: out * 0.9),
        "o_proj",
    ),
    "a matrix is more after 40 calls": (
        f"{L1}.mlp.down_proj",
        False,
        _after(40, lambda out: out * 1.2),
        "down_proj",
    ),
    "steps of two tokens are wrong": (
        f"{L0}.mlp.down_proj",
        False,
        lambda out: out * (1.5 if len(out) == 2 else 1.0),
        "down_proj",
    ),
}
"""By name: the module, whether what it is given or what it returns changes, how, and the end of the place that is named."""


def spoil(worker: Any, fault: str) -> None:
    name, is_given, change, _ = FAULTS[fault]

    def first(values: Any) -> Any:
        return (change(values[0]), *values[1:]) if isinstance(values, tuple) else change(values)

    module = worker.get_model().get_submodule(name)
    if is_given:
        module.register_forward_pre_hook(lambda _, args: first(args))
    else:
        module.register_forward_hook(lambda _, args, returned: first(returned))


def certified(path: str, fault: str = "", **engine: Any) -> dict[str, Any]:
    from flashpatch.verify.exact import command

    with exact_faults.planted(*([spoil, fault] if fault else [])):
        return command.certify(path, "", {"kv_cache_memory_bytes": 16 << 20, **engine}).as_json()


@pytest.fixture(scope="module")
def runner():
    with scenario.Runner() as interpreter:
        yield interpreter


@pytest.mark.parametrize("fault", exact_faults.some_full(FAULTS, SOON))
def test_a_planted_fault_is_named(runner, tmp_path, fault: str) -> None:
    found = runner(certified, str(models.checkpoint(tmp_path, "llama")), fault)
    assert found["first"] and found["first"].endswith(FAULTS[fault][-1]), (found["first"], found["problem"])


def test_one_expert_of_many_is_named(runner, tmp_path) -> None:
    model = models.checkpoint(tmp_path, "qwen3-moe", num_experts=64, num_experts_per_tok=8)
    honest = runner(certified, str(model))
    assert honest["ok"], (honest["first"], honest["problem"], honest["not_compared"])
    found = runner(certified, str(model), model=str(exact_faults.plant(model, "experts exchanged", tmp_path)))
    assert found["first"] == f"{L1}.mlp", found["problem"]
