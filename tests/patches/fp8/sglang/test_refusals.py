"""Settings of an SGLang engine that no update can follow are refused by name."""

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import sglang_lab as lab
import torch

from flashpatch.patches.fp8.sglang import loader_adapter, schedulers

PLAIN: dict[str, Any] = dict(
    enable_lora=False, enable_eplb=False, cpu_offload_gb=0, offload_group_size=-1, pp_size=1
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_eplb", True),
        ("cpu_offload_gb", 1),
        ("offload_group_size", 2),
        ("pp_size", 2),
        ("hicache_storage_backend", "file"),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_unified_cache_external_linker", True),
        ("radix_cache_backend", "of somebody else's"),
    ],
)
def test_a_setting_is_refused_by_name(name: str, value: Any) -> None:
    assert name in loader_adapter.refusal(torch.nn.Linear(1, 1), {**PLAIN, name: value})


#: What else shapes a cache: one that `flush_cache` empties, or one that is refused already.
SHAPES = frozenset(
    "enable_hierarchical_cache enable_session_radix_cache flexkv_config_file hicache_host_memory_mode lmcache_config_file "
    "radix_eviction_policy unified_cache_external_linker_backend".split()
)


@pytest.mark.sglang
@pytest.mark.skipif(lab.OLD, reason="its scheduler chooses the cache, and has two of the settings")
def test_the_installed_sglang_chooses_a_cache_by_no_setting_that_is_not_in_the_table() -> None:
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    source = (root / "srt/mem_cache/registry.py").read_text()
    read = set(re.findall(r"get_memory\(\)\.(\w+)", source))
    assert "enable_lmcache" in read
    assert read - SHAPES <= {*loader_adapter.KEEPS_KV}, "say whether flush_cache empties what it chooses"


def test_no_store_is_attached_to_an_engine_that_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = types.SimpleNamespace(AttachHiCacheStorageReqOutput=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", answer)
    attached: list[Any] = []
    monkeypatch.setattr(schedulers.model_registry, "all_models", lambda: [object()])
    found = schedulers.attach_hicache_storage_wrapped(attached.append, "scheduler")
    assert not found.success and "hicache_storage_backend" in found.message and attached == []
    monkeypatch.setattr(schedulers.model_registry, "all_models", list)
    schedulers.attach_hicache_storage_wrapped(attached.append, "scheduler")
    assert attached == ["scheduler"]
