"""Memory: none is gained over many updates, scales are not left behind."""

import gc
import random
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, scenario

pytestmark = pytest.mark.vllm

FP8 = dict(quantization="fp8_per_channel")
ROUNDS = 20


# --- what runs in the engine's process


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def tensors() -> tuple[int, int]:
    """How many tensors there are, and their bytes, each storage once."""
    import torch

    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return len(found), sum(sizes.values())


def many(sources: list[str], kw: dict[str, Any], seed: int) -> dict[str, Any]:
    """Random updates in a row, a failed one among them now and then; what was measured after each round."""
    rng = random.Random(seed)
    with engines.open_llm(sources[0], **kw) as llm:
        before = engines.addresses(engines.inner_model(llm))
        rounds = []
        for number in range(ROUNDS):
            source = rng.randrange(len(sources))
            items = list(models.weights(sources[source]))
            if rng.random() < 0.25:
                failing = updates.failing(rng.sample(items, len(items)), rng.randrange(len(items)))
                assert updates.error(lambda: engines.inner_model(llm).load_weights(failing))
            updates.sync(llm, updates.buckets(items, rng))
            updates.finish(llm)
            answers = engines.answers(llm, tokens=4) if number % 5 == 4 else None
            del items
            rounds.append(dict(source=source, answers=answers, tensors=tensors(), resident=resident()))
        moved = before != engines.addresses(engines.inner_model(llm))
    return dict(rounds=rounds, moved=moved)


def scales(a: str, b: str, kw: dict[str, Any]) -> dict[str, Any]:
    """An engine with an fp8 KV cache on A, brought to B and back: every copy of every scale, and the answers."""
    with engines.open_llm(a, **kw) as llm:
        found: dict[str, Any] = dict(before=_scales(llm), steps=[])
        for source in (b, a, b):
            updates.send(llm, [list(models.weights(source))])
            found["steps"].append(dict(answers=engines.answers(llm), scales=_scales(llm)))
    return found


def fresh_scales(model: str, kw: dict[str, Any]) -> dict[str, float]:
    with engines.open_llm(model, **kw) as llm:
        return _scales(llm)


def _scales(llm: Any) -> dict[str, float]:
    """layer.attribute -> value, for the device tensors, CPU tensors and floats."""
    found = {}
    for name, module in engines.inner_model(llm).named_modules():
        for key in [*vars(module), *module._buffers]:
            if key.startswith(("_k_scale", "_v_scale", "_q_scale", "_prob_scale")):
                value = getattr(module, key)
                if value is not None:
                    found[f"{name}.{key}"] = float(value)
    return found


# --- the tests


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kw"), [("qwen2", {}), ("llama", FP8), ("qwen3-moe", {})], ids=["bf16", "fp8", "moe"]
)
def test_twenty_random_updates_gain_nothing(bf16: scenario.Runner, family: str, kw: dict[str, Any]) -> None:
    wide = {} if family == "qwen3-moe" else dict(intermediate_size=4096)  # so that a leak stands out
    sources = [updates.checkpoint(family, seed, **wide) for seed in (0, 1)]
    seed = updates.seed_of_the_day()
    got = bf16(many, sources, kw, seed)
    rounds = got["rounds"]
    for found in rounds:
        if found["answers"] is not None:
            want = oracle.answers(sources[found["source"]], **kw)
            ours, theirs = (engines.array(x["prompt_logprobs"]) for x in (found["answers"], want))
            assert ours.tobytes() == theirs.tobytes()
    assert not got["moved"]
    counts, sizes = zip(*(found["tensors"] for found in rounds[5:]))
    assert max(counts) - counts[0] <= 2 and max(sizes) - sizes[0] <= 1 << 16
    grown = rounds[-1]["resident"] - rounds[5]["resident"]
    weights = sum(t.numel() * t.element_size() for _, t in models.weights(sources[0]))
    allowed = 3 * weights + (16 << 20)  # a leak of every update's weights would be 14 times those
    assert grown < allowed, f"{grown >> 20} MiB in 14 updates of {weights >> 20} MiB"


@pytest.mark.skipif(not environment.avx512(), reason="vLLM's fp8 cache on a CPU needs AVX-512")
def test_scales_of_an_fp8_cache_follow_the_weights(bf16: scenario.Runner) -> None:
    a, b = (
        str(updates.with_cache_scales(updates.checkpoint("llama", seed, "fp8-channel"), seed))
        for seed in (0, 1)
    )
    kw = dict(kv_cache_dtype="fp8")
    want = {source: bf16(fresh_scales, source, kw) for source in (a, b)}
    assert len(want[a]) > 8 and want[a] != want[b]
    got = bf16(scales, a, b, kw)
    assert got["before"] == want[a]
    for step, source in zip(got["steps"], (b, a, b)):
        assert step["scales"] == want[source]
        assert engines.difference(step["answers"], oracle.answers(source, **kw)).exact
