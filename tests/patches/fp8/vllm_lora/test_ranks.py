"""Adapters on two tensor-parallel ranks: in place on both, or on neither."""

from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, scenario

pytestmark = pytest.mark.vllm

TP2 = dict(tensor_parallel_size=2, fork=True)


# --- what runs on each rank


def break_rank(worker: Any, where: str) -> None:
    """Let the next adapter fail on rank 1: while it is loaded, or in the middle of the layers."""
    if worker.rank != 1:
        return
    manager = worker.model_runner.lora_manager
    modules = manager._adapter_manager.modules
    owner, name = {
        "load": (manager, "_load_adapter"),
        "place": (list(modules.values())[len(modules) // 2], "set_lora"),
    }[where]
    plain = getattr(owner, name)

    def fails(*args: Any) -> None:
        setattr(owner, name, plain)
        raise OSError("rank 1 lost it")

    setattr(owner, name, fails)


def versions(worker: Any) -> int:
    from flashpatch.patches.fp8.vllm_lora import worker_manager

    return worker_manager.of(worker.model_runner).version


# --- what runs in the client's process


def together(a: str, folders: list[str]) -> dict[str, Any]:
    with engines.open_llm(a, **lora_lab.ENGINE, **TP2) as llm:
        lora_lab.send(llm, folders[0])
        found: dict[str, Any] = dict(first=lora_lab.ask(llm, folders[0]), failed={})
        for where in ("load", "place"):
            llm.collective_rpc(break_rank, args=(where,))
            error = updates.error(lambda: lora_lab.send(llm, folders[1]))
            kept = lora_lab.ask(llm, folders[0])
            found["failed"][where] = dict(error=error, kept=kept, versions=llm.collective_rpc(versions))
        lora_lab.send(llm, folders[1])
        found["second"] = lora_lab.ask(llm, folders[1])
        found["versions"] = llm.collective_rpc(versions)
    return found


# --- the test


def test_ranks_take_an_adapter_together_or_not_at_all() -> None:
    a = updates.checkpoint("qwen2", 0)
    folders = [lora_lab.adapter(a, seed) for seed in (1, 2)]
    if version_of("vllm") < Version("0.27"):
        with pytest.raises(scenario.ScenarioError, match="einsum"):  # in its operators for CPUs
            lora_lab.fresh(a, folders[0], **TP2)
        pytest.skip("vLLM 0.24 itself fails under an adapter on two ranks of a CPU")
    got = scenario.run(together, a, folders, env={"FLASHPATCH": "bf16"}, timeout=500)
    fresh = [lora_lab.fresh(a, folder, **TP2) for folder in folders]
    assert engines.difference(got["first"], fresh[0]).exact
    for where, found in got["failed"].items():
        assert "rank 1 lost it" in found["error"], where
        assert found["versions"] == [1, 1] and engines.difference(found["kept"], fresh[0]).exact, where
    assert engines.difference(got["second"], fresh[1]).exact and got["versions"] == [2, 2]
