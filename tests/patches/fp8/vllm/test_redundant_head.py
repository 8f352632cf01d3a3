"""Update an engine whose tied checkpoint also holds ``lm_head.weight``: vLLM loads it, finds it equal, and ties again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle

pytestmark = pytest.mark.vllm

#: Whether vLLM's models take a head that is tied. Older ones pass over it, so a head alone changes nothing.
TAKEN = version_of("vllm") >= Version("0.31")


def with_head(directory: str) -> str:
    """The same tied checkpoint with a copy of its embedding as head."""
    from safetensors.torch import save_file

    source = Path(directory)
    with models.making(source.with_name(f"{source.name}-head")) as (target, work):
        if work is not None:
            for file in source.iterdir():
                if file.suffix != ".safetensors":
                    (work / file.name).write_bytes(file.read_bytes())
            tensors = dict(models.weights(source))
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def rank(worker: Any) -> int:
    return worker.rank


def synced(start: str, tied: str, full: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a trainer sends: without the head; with it; in one call; a call per tensor, asking in between."""
    import flashpatch

    parts: dict[str, list[list[updates.Named]]] = {
        "one call": [list(models.weights(tied))],
        "a call per tensor": [[item] for item in models.weights(tied)],
        "with the head, in a call of its own at the end": [
            *([item] for item in models.weights(tied)),
            [("lm_head.weight", dict(models.weights(full))["lm_head.weight"])],
        ],
        "with the head": [list(models.weights(full))],
    }
    flashpatch.enable("bf16", **options)
    found: dict[str, Any] = {}
    try:
        with engines.open_llm(start) as llm:
            for how, buckets in parts.items():
                updates.send(
                    llm, [list(models.weights(start))]
                )  # so that every way begins at the same policy
                engines.greedy(llm, 1)
                for bucket in buckets:
                    updates.send(llm, [bucket])
                    llm.collective_rpc(rank)  # after any call the engine core asks what workers hold
                found[how] = updates.refusal(llm) or engines.answers(llm)
            updates.send(llm, [[("lm_head.weight", dict(models.weights(start))["lm_head.weight"])]])
            found["a head of another policy alone"] = updates.refusal(llm) or engines.answers(llm)
    finally:
        flashpatch.disable("bf16")
    return found


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_what_is_tied_again_comes_with_what_it_is_tied_to(runner, atomic: str) -> None:
    a, b = (updates.checkpoint("qwen2-tied", seed) for seed in (0, 1))
    want = oracle.answers(b)
    got = runner(synced, with_head(a), b, with_head(b), dict(atomic=atomic))
    alone = got.pop("a head of another policy alone")
    for how, answers in got.items():
        assert not isinstance(answers, str), f"{how}: {answers}"
        assert engines.difference(answers, want).exact, how
    if atomic == "model" or not TAKEN:  # the old policy stays
        assert not isinstance(alone, str) and engines.difference(alone, want).exact, alone
    else:
        assert isinstance(alone, str), "nothing is generated"
