"""A base and an adapter in one stream, cut again where they were joined."""

import asyncio
import enum
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

from flashpatch.patches.fp8.verl import adapters


class Kind(enum.Enum):
    LORA = "CAUSAL_LM"


BASE = [("embed", torch.arange(6.0)), ("q_proj.base_layer.weight", torch.ones(2, 2))]
ADAPTER = [("q_proj.lora_A.weight", torch.zeros(1, 2))]
CONFIG = {"r": 1, "target_modules": {"q_proj", "k_proj"}, "task_type": Kind.LORA, "lora_alpha": 2}
READ = {"r": 1, "target_modules": ["k_proj", "q_proj"], "task_type": "CAUSAL_LM", "lora_alpha": 2}


async def relayed(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def cut(items: Iterable[Any]) -> list[Any]:
    async def parts() -> list[Any]:
        found = []
        async for part, told in adapters.Parts(relayed(items)):
            found.append(([item async for item in part], told))
        return found

    return asyncio.run(parts())


def test_base_and_adapter_come_out_as_they_went_in_and_aligned():
    stream = itertools.chain(adapters.marked(BASE, CONFIG, False), adapters.marked(ADAPTER, CONFIG, True))
    assert cut(stream) == [
        (BASE, {"peft_config": READ, "base_sync_done": False}),
        (ADAPTER, {"peft_config": READ, "base_sync_done": True}),
    ]
    assert cut(BASE) == [(BASE, {})]
    assert cut([]) == [([], {})]
    (name, mark), *_ = adapters.marked(ADAPTER, CONFIG, True)
    assert name.startswith(adapters.MARK) and mark.numel() % 512 == 0 and mark.dtype == torch.uint8
