"""Sleep with memory that goes away (`sleep_pool`): after wake-up and update the engine answers as a fresh one.

A cell opens an engine on A; sleeps at level 1; sleeps at level 2, wakes weights, takes B in buckets cut and shuffled
from a printed seed (FLASHPATCH_LAB_SEED repeats it), wakes the KV cache; sleeps at level 2 again, wakes all at once,
must refuse, takes A."""

import random
from typing import Any

import pytest
import vllm_precisions as precisions
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, quantized, scenario

pytestmark = pytest.mark.vllm

FP8 = dict(quantization="fp8_per_channel")
KV = dict(kv_cache_dtype="fp8")

#: name -> (family, scheme of the checkpoint, engine keywords); "+kv": scales for an fp8 KV cache in the checkpoint
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    **{family: (family, None, {}) for family in models.FAMILIES if family != "deepseek-v2"},
    **{
        f"{family} fp8": (family, None, FP8)
        for family in ("qwen2", "qwen2-tied", "llama", "llama-biased", "qwen3", "gemma3", "phi3")
    },
    "qwen2 ct-int8": ("qwen2", "int8", {}),
    "qwen2 ct-fp8-tensor": ("qwen2", "fp8-tensor", {}),
    "qwen2 ct-w4a16": ("qwen2", "w4a16", {}),
    "qwen2 torchao": ("qwen2", None, quantized.torchao("Int8WeightOnlyConfig")),
    "qwen2 fp8 cache": ("qwen2", None, KV),
    "qwen2 fp8, fp8 cache": ("qwen2", None, {**FP8, **KV}),
    "llama ct-fp8, fp8 cache": ("llama", "fp8-channel", KV),
    "llama fp8 cache, scales": ("llama", "fp8-channel+kv", KV),
    "llama tp2": ("llama", None, dict(tensor_parallel_size=2)),
}
NEEDS_AVX512 = {one for one, (_, scheme, kw) in CASES.items() if scheme == "w4a16" or "kv_cache_dtype" in kw}
SHAPES = pytest.mark.xfail(
    strict=True,
    reason="weight_shape comes once per shard, which only a load from a checkpoint shows: the second is refused",
)
QUICK = [("qwen2 fp8", "dummy"), ("llama ct-fp8, fp8 cache", "auto")]


def checkpoint(case: str, seed: int) -> str:
    family, scheme, _ = CASES[case]
    made = updates.checkpoint(family, seed, (scheme or "").removesuffix("+kv") or None)
    return str(updates.with_cache_scales(made, seed)) if scheme and scheme.endswith("+kv") else made


def load(worker: Any, path: str, seed: int, end: bool) -> None:
    """On each rank: a checkpoint, in buckets if their ``end`` is named."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = worker.get_model()
    items = list(models.weights(path))
    for part in updates.buckets(items, random.Random(seed)) if end else [items]:
        model.load_weights(part)
    if end:
        with set_current_vllm_config(worker.vllm_config):
            process_weights_after_loading(model, worker.model_config, torch.device("cpu"))


def lost(worker: Any) -> int:
    """On each rank: how many tensors that something still holds contain garbage alone."""
    return len(worker.pool.lost())


def nights(a: str, b: str, kw: dict[str, Any], seed: int, load_format: str = "auto") -> dict[str, Any]:
    """Level 1; level 2 with a wake-up in two parts; level 2 with a wake-up at once."""
    found: dict[str, Any] = {}
    with precisions.opened("bf16", a, load_format=load_format, **environment.SLEEPING, **kw) as llm:
        if load_format == "auto":
            llm.sleep(level=1)
            llm.wake_up(["kv_cache"])
            llm.wake_up(["weights"])
            found["kept"] = engines.answers(llm)
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.collective_rpc(load, args=(b, seed, False))
        llm.wake_up(["kv_cache"])
        found["b"] = engines.answers(llm)
        llm.sleep(level=2)
        llm.wake_up()
        found["refusal"] = updates.refusal(llm)
        found["gone"] = llm.collective_rpc(lost)
        llm.collective_rpc(load, args=(a, seed + 1, True))
        found["lost"] = llm.collective_rpc(lost)
        found["a"] = engines.answers(llm)
    return found


def in_processes(a: str, b: str, kw: dict[str, Any], seed: int) -> dict[str, Any]:
    """With workers in processes of their own: level 2, wake-up, requests before and after an update."""
    found: dict[str, Any] = {}
    with precisions.opened("bf16", a, **environment.SLEEPING, **kw) as llm:
        found["a"] = engines.answers(llm)
        llm.sleep(level=2)
        llm.wake_up()
        found["refusals"] = [updates.refusal(llm) for _ in range(2)]
        llm.collective_rpc(load, args=(b, seed, False))
        found["b"] = engines.answers(llm)
        llm.sleep(level=1)
        llm.wake_up()
        found["kept"] = engines.answers(llm)
    return found


def preserved(a: str, b: str) -> dict[str, Any]:
    """Sleep with a frozen table that the engine itself keeps: what the trainer sends lacks it."""
    frozen = "model.embed_tokens.weight"
    found: dict[str, Any] = {}
    kw = dict(sleep_preserve_parameter_names=[frozen], **environment.SLEEPING)
    with precisions.opened("bf16", a, **kw) as llm:
        sent = [item for item in models.weights(b) if item[0] != frozen]
        for number in range(2):
            llm.sleep(level=2)
            llm.wake_up()
            found["refusal"] = updates.refusal(llm)
            updates.send(llm, [sent[number:]])
            found["missing"] = updates.error(lambda: updates.finish(llm))
            found.setdefault("answers", []).append(updates.refusal(llm) or engines.answers(llm))
        found["lost"] = sum(llm.collective_rpc(lost))
    return found


def need(case: str) -> dict[str, Any]:
    if case in NEEDS_AVX512 and not environment.avx512():
        pytest.skip("vLLM needs AVX-512 for this on a CPU")
    if "torchao" in case:
        pytest.importorskip("torchao")
    family, _, kw = CASES[case]
    updates.need(family)
    return kw


@pytest.mark.parametrize(
    ("case", "load_format"),
    [
        pytest.param(
            case,
            how,
            marks=([] if (case, how) in QUICK else [pytest.mark.full])
            + ([SHAPES] if (case, how) == ("qwen2 ct-w4a16", "dummy") else []),
        )
        for case in CASES
        for how in ("auto", "dummy")
    ],
)
def test_updates_after_sleep(runner: scenario.Runner, case: str, load_format: str) -> None:
    kw, seed = need(case), updates.seed_of_the_day()
    a, b = (checkpoint(case, number) for number in (0, 1))
    want = {"a": oracle.answers(a, **kw), "b": oracle.answers(b, **kw)}
    assert engines.difference(want["a"], want["b"]).mean > 0.01, (
        "A and B answer alike: nothing would be shown"
    )
    got = runner(nights, a, b, kw, seed, load_format)
    assert "sleep level 2" in (got["refusal"] or ""), "weights that are gone were served"
    if load_format == "auto":
        assert engines.difference(got["kept"], want["a"]).exact, "level 1 lost weights"
    for name in ("b", "a"):
        gap = engines.difference(got[name], want[name])
        assert gap.exact, f"seed {seed}, after the update to {name}: {gap}"
    assert all(got["gone"]) and not any(got["lost"]), f"tensors that nobody brought back: {got['lost']}"


@pytest.mark.parametrize(
    "kw",
    [
        dict(processes=True, fork=True),
        pytest.param(dict(processes=True), marks=pytest.mark.full),
        pytest.param(dict(tensor_parallel_size=2), marks=pytest.mark.full),
    ],
    ids=["forked", "process", "ranks"],
)
def test_an_engine_in_processes_refuses_and_lives(runner: scenario.Runner, kw: dict[str, Any]) -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    got = runner(in_processes, a, b, kw, updates.seed_of_the_day())
    for refusal in got["refusals"]:
        assert "PatchError" in refusal and "sleep level 2" in refusal
    fresh = oracle.answers(b, **{key: value for key, value in kw.items() if key not in ("processes", "fork")})
    assert engines.difference(got["b"], fresh).exact
    assert engines.difference(got["kept"], fresh).exact


@pytest.mark.vllm(least="0.31")  # 0.27 keeps no parameters by name
def test_what_the_engine_keeps_over_a_sleep_need_not_come(runner: scenario.Runner) -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    got = runner(preserved, a, b)
    assert "sleep level 2" in got["refusal"]
    want = oracle.answers(updates.mixture(b, ("embed_tokens", a)))
    first, second = got["answers"]
    assert not isinstance(first, str), first
    assert engines.difference(first, want).exact
    assert "lm_head.weight did not come" in got["missing"] and "lm_head.weight did not come" in second
