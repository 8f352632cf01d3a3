"""Update an engine whose tied checkpoint also holds ``lm_head.weight``: vLLM loads it, finds it equal, and ties again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

#: Whether vLLM's models take a head that its checkpoint has. Older ones pass over it if the config says that it is tied.
TAKEN = version_of("vllm") >= Version("0.31")


def with_head(directory: str) -> str:
    """The same tied checkpoint with a copy of its embedding as head."""
    source = Path(directory)
    with models.making(source.with_name(f"{source.name}-head")) as (target, work):
        if work is not None:
            tensors = dict(models.weights(source))
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            models.write_changed(work, source, tensors)
    return str(target)


def rank(worker: Any) -> int:
    return worker.rank


def synced(start: str, tied: str, full: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a trainer sends: without the head; with it; in one call; a call per tensor, asking in between."""
    parts: dict[str, list[list[updates.Named]]] = {
        "one call": [list(models.weights(tied))],
        "a call per tensor": [[item] for item in models.weights(tied)],
        "with the head, in a call of its own at the end": [
            *([item] for item in models.weights(tied)),
            [("lm_head.weight", dict(models.weights(full))["lm_head.weight"])],
        ],
        "with the head": [list(models.weights(full))],
    }
    found: dict[str, Any] = {}
    with opened("bf16", start, options=options) as llm:
        for how, buckets in parts.items():
            updates.send(llm, [list(models.weights(start))])  # so that every way begins at the same policy
            engines.greedy(llm, 1)
            for bucket in buckets:
                updates.send(llm, [bucket])
                llm.collective_rpc(rank)  # after any call the engine core asks what workers hold
            found[how] = updates.refusal(llm) or engines.answers(llm)
        head = ("lm_head.weight", dict(models.weights(start))["lm_head.weight"])
        error = updates.error(lambda: updates.send(llm, [[head]]))
        found["a head of another policy alone"] = [error, updates.refusal(llm)]
    return found


@pytest.mark.parametrize("atomic", ["layer", pytest.param("model", marks=pytest.mark.full)])
def test_what_is_tied_again_comes_with_what_it_is_tied_to(runner, atomic: str) -> None:
    a, b = (updates.checkpoint("qwen2-tied", seed) for seed in (0, 1))
    want = oracle.answers(b)
    got = runner(synced, with_head(a), b, with_head(b), dict(atomic=atomic))
    error, refusal = got.pop("a head of another policy alone")
    for how, answers in got.items():
        assert not isinstance(answers, str), f"{how}: {answers}"
        assert engines.difference(answers, want).exact, how
    assert "lm_head.weight came first" in error and "lm_head.weight came first" in refusal


def heads(a: str, b: str, kw: dict[str, Any]) -> dict[str, Any]:
    """An engine that was opened without a head gets one that equals the embedding, or is turned around."""
    weights = dict(models.weights(b))
    embedding = weights["model.embed_tokens.weight"]
    equal, other = embedding.float(), embedding.flip(0).contiguous()
    found: dict[str, Any] = {}
    with engines.open_llm(a, **kw) as llm:

        def each_alone(items: list[updates.Named]) -> None:
            for item in items:
                updates.send(llm, [[item]])
                llm.collective_rpc(rank)

        def tried(send: Callable[[], None]) -> Any:
            return updates.error(send) or updates.refusal(llm) or engines.answers(llm)

        for head, which in ((equal, "equal"), (other, "other")):
            items = [*weights.items(), ("lm_head.weight", head)]
            for buckets, how in (([items], "one call"), ([items[-1:], items[:-1]], "before")):
                found[f"{which} {how}"] = tried(lambda: updates.send(llm, buckets))
                updates.send(llm, [items[:-1]])
                engines.greedy(llm, 1)
            found[f"{which} a call per tensor"] = tried(lambda: each_alone(items))
            llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(items[:-1])))
    return found


@pytest.mark.parametrize(
    "family, kw",
    [
        pytest.param("qwen2-tied", {}, marks=pytest.mark.full),
        ("qwen2-tied", dict(load_format="dummy", quantization="fp8_per_channel")),
        pytest.param("gemma3", dict(load_format="dummy"), marks=pytest.mark.full),
    ],
)
def test_an_engine_without_a_head(family: str, kw: dict[str, Any]) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    with scenario.Runner({"FLASHPATCH": "bf16"}) as interpreter:
        got = interpreter(heads, a, b, kw)
    want = oracle.answers(b, **{key: value for key, value in kw.items() if key != "load_format"})
    for how, answers in got.items():
        if how.startswith("equal"):
            assert not isinstance(answers, str), f"{how}: {answers}"
            assert engines.difference(answers, want).exact, how
        else:
            assert isinstance(answers, str) and "lm_head.weight" in answers, how
