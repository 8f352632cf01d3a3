"""What the rollout's client says to a sync that does not bring what its trainer has."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl import adapters
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.patches.fp8.verl_vllm import trainer

BASE = [("q_proj.base_layer.weight", torch.ones(2, 2))]
ADAPTER = [("q_proj.lora_A.weight", torch.zeros(1, 2))]
CONFIG = {"r": 8, "lora_alpha": 16}


class Client(SimpleNamespace):
    """As much of verl's ServerAdapter as the check reads."""

    __hash__ = object.__hash__

    def __init__(self, load_format: str = "dummy", **model: Any) -> None:
        super().__init__(
            config=SimpleNamespace(load_format=load_format),
            model_config={"lora_rank": 8, "lora": {}, **model},
            replica_rank=1,
            rollout_rank=0,
        )


def sync(client: Client, items: Any, **kwargs: Any) -> list[Any]:
    """Let the client take a relayed stream; return names and what verl's update was told, call by call."""
    calls = []

    async def original(self: Any, weights: Any, **told: Any) -> None:
        calls.append(([name async for name, _ in weights], told))

    async def relayed() -> Any:
        for item in items:
            yield item

    async def take() -> None:
        await trainer.server_adapter_update_weights(original, client, relayed(), global_steps=3, **kwargs)

    try:
        asyncio.run(take())
    finally:
        WEIGHT_SYNC.reset()
    return calls


def marked(base: bool) -> Any:
    if base:
        yield from adapters.marked(BASE, CONFIG, base_sync_done=False)
    yield from adapters.marked(ADAPTER, CONFIG, base_sync_done=True)


def test_a_stream_becomes_the_calls_that_verl_makes_itself():
    client = Client()
    told = {"global_steps": 3, "peft_config": CONFIG}
    first, second = sync(client, marked(base=True))
    assert first == (["q_proj.base_layer.weight"], {**told, "base_sync_done": False})
    assert second == (["q_proj.lora_A.weight"], {**told, "base_sync_done": True})
    assert sync(client, marked(base=False)) == [second]  # the base came once


def test_a_sync_without_adapters_and_an_adapter_before_any_base_are_errors():
    with pytest.raises(PatchError) as error:
        sync(Client(), BASE)
    assert "the trainer has LoRA adapters (lora_rank=8) and this sync brings none" in str(error.value)
    assert "the engine of replica 1, which lists no adapter" in str(error.value)
    with pytest.raises(PatchError, match=r"opened on dummy weights \(load_format=dummy\)"):
        sync(Client(), marked(base=False))
    assert len(sync(Client(load_format="auto"), marked(base=False))) == 1


@pytest.mark.parametrize("model", [{"lora": {"merge": True}}, {"lora_rank": 0}])
def test_without_adapters_whole_weights_pass(model):
    assert sync(Client(**model), BASE) == [(["q_proj.base_layer.weight"], {"global_steps": 3})]


def test_parts_of_changed_weights_are_an_error():
    with pytest.raises(PatchError, match="this sync brings none"):
        sync(Client(), BASE, wire_format="delta_flush")


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ({"lora_rank": 8, "lora": {}}, "lora_rank=8"),
        ({"lora_rank": 0, "lora": {"rank": 4}}, "lora.rank=4"),
        ({"lora_rank": 8, "lora": {"rank": 4, "merge": True}}, ""),
        ({"lora_rank": 0, "lora": {"rank": 0}}, ""),
        ({}, ""),
    ],
)
def test_the_setting_that_asks_for_adapters(model, setting):
    assert adapters.asked(model) == setting
