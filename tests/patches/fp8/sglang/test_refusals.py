"""Settings of an SGLang engine that no update can follow are refused by name."""

from typing import Any

import pytest
import torch

from flashpatch.patches.fp8.sglang import loader_adapter

PLAIN: dict[str, Any] = dict(
    enable_lora=False, enable_eplb=False, cpu_offload_gb=0, offload_group_size=-1, pp_size=1
)


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_eplb", True), ("cpu_offload_gb", 1), ("offload_group_size", 2), ("pp_size", 2)],
)
def test_a_setting_is_refused_by_name(name: str, value: Any) -> None:
    assert name in loader_adapter.refusal(torch.nn.Linear(1, 1), {**PLAIN, name: value})
