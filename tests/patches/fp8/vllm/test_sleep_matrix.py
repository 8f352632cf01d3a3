"""Every kind of model, asleep and awake, under both atomic modes: after an update it answers as a fresh engine.

A cell opens one engine and brings it to B and A in turn, in one call and in buckets of five tensors: awake, after
sleep level 1, and after level 2 with the KV cache woken after the update; the engine's memory goes away as an
accelerator's does (`sleep_pool`). With ``atomic="model"``, buckets leave the old policy serving, and level 2, which
leaves nothing to fall back to, is refused by name."""

from typing import Any

import pytest
import vllm_precisions as precisions
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, scenario

pytestmark = [pytest.mark.vllm, pytest.mark.full]

FP8 = dict(quantization="fp8_per_channel")
MLA = dict(attention_backend="CPU_MLA")  # the default on CPUs with AMX is refused

#: name -> (family, what its config has beyond the family's, engine keywords)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{
        family: (family, {}, MLA if family == "deepseek-v3" else {})
        for family in (
            *"qwen2 qwen2-tied llama qwen3-moe mixtral olmoe gpt-oss deepseek-v3 qwen3-next mamba2 falcon-h1".split(),
            *"granite-moe-hybrid nemotron-h".split(),
        )
    },
    **{
        f"{family} fp8": (family, {}, FP8)
        for family in ("qwen2", "qwen2-tied", "llama", "mamba2", "falcon-h1")
    },
    # Experts have no fp8 kernel on a CPU: the dense layers alone, whose W_UK and W_UV come from a quantized kv_b_proj.
    "deepseek-v3 fp8": ("deepseek-v3", dict(first_k_dense_replace=2), {**FP8, **MLA}),
}
SIZES = {"whole": None, "fives": 5}  # tensors of a bucket


def buckets(source: str, size: int | None) -> list[list[updates.Named]]:
    items = list(models.weights(source))
    return [items[start : start + (size or len(items))] for start in range(0, len(items), size or len(items))]


def take(llm: Any, source: str, size: int | None) -> str | None:
    """Send a checkpoint; return why the engine did not generate between its buckets, None where it did."""
    between = None
    parts = buckets(source, size)
    for number, part in enumerate(parts):
        updates.send(llm, [part])
        if number == 0 and len(parts) > 1:
            between = updates.refusal(llm)
    updates.finish(llm)
    return between


def cell(a: str, b: str, kw: dict[str, Any], load_format: str, atomic: str) -> list[dict[str, Any]]:
    """One row per update: what was sent, what the engine answered, or why it refused."""
    rows: list[dict[str, Any]] = []
    source = a
    with precisions.opened(
        "bf16", a, load_format=load_format, options=dict(atomic=atomic), **environment.SLEEPING, **kw
    ) as llm:
        for level in (0, 1, 2):
            for name, size in SIZES.items():
                source = b if source == a else a
                row: dict[str, Any] = dict(source="ab"[source == b], level=level, size=name)
                rows.append(row)
                if level:
                    llm.sleep(level=level)
                    llm.wake_up(["weights"])
                try:
                    if level:  # no KV cache to generate with
                        updates.send(llm, buckets(source, size))
                    else:
                        row["between"] = take(llm, source, size)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
                if level:
                    llm.wake_up(["kv_cache"])
                if "error" in row:
                    row["refusal"] = updates.refusal(llm)
                else:
                    row["answers"] = engines.answers(llm)
    return rows


@pytest.mark.parametrize("atomic", ["layer", "model"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", MODELS)
def test_updates_asleep_and_awake(runner: scenario.Runner, name: str, load_format: str, atomic: str) -> None:
    family, config, kw = MODELS[name]
    updates.need(family)
    a, b = (updates.checkpoint(family, seed, **config) for seed in (0, 1))
    want = {"a": oracle.answers(a, **kw), "b": oracle.answers(b, **kw)}
    assert engines.difference(want["a"], want["b"]).mean > 0.01, (
        "A and B answer alike: nothing would be shown"
    )
    rows = runner(cell, a, b, kw, load_format, atomic, timeout=240)
    assert [(row["level"], row["size"]) for row in rows] == [(n, size) for n in (0, 1, 2) for size in SIZES]
    for row in rows:
        at = f"level {row['level']}, {row['size']}, to {row['source']}"
        if atomic == "model" and row["level"] == 2:
            assert "atomic='model' has nothing to fall back to" in row["error"], at
            assert "sleep level 2" in row["refusal"], f"{at}: weights that are gone were served"
            continue
        assert "error" not in row, f"{at}: {row['error']}"
        gap = engines.difference(row["answers"], want[row["source"]])
        assert gap.exact, f"{at}: {gap}"
        if row["level"] == 0 and row["size"] == "fives":
            assert (row["between"] is None) == (atomic == "model"), f"{at}: {row['between']}"
