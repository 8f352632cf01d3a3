"""Two ranks in processes of their own, tensor-parallel or pipeline stages: they update together or not at all."""

import time
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm

TP2 = dict(tensor_parallel_size=2)
PP2 = dict(pipeline_parallel_size=2)
BAD = ("early", "NaN", "missing", "raises")
PATIENCE = 110.0  # seconds: below the 120 s after which ranks stop waiting for each other


# --- what runs on each rank


def load(worker: Any, path: str, parts: int = 1, bad: str | None = None, bad_rank: int = 1) -> None:
    """The checkpoint in so many buckets; on one rank it is spoiled, or does not even begin."""
    if bad == "early" and worker.rank == bad_rank:
        raise OSError("lost before it began")
    items = list(models.weights(path))
    names = [name for name, _ in items]
    if bad is not None and worker.rank == bad_rank:
        if bad == "NaN":
            index = names.index("model.layers.1.mlp.down_proj.weight")
            items[index] = (names[index], items[index][1] * float("nan"))
        elif bad == "missing":
            del items[names.index("model.layers.0.self_attn.k_proj.weight")]
    for part in range(parts):
        bucket = items[len(items) * part // parts : len(items) * (part + 1) // parts]
        failing = bad == "raises" and worker.rank == bad_rank and part == parts - 1
        worker.get_model().load_weights(updates.failing(bucket, 2) if failing else bucket)


def rank(worker: Any, number: int, fails: bool = False) -> list[int]:
    if fails and worker.rank == 0:
        raise ValueError("on purpose")
    return [number, worker.rank]


def slow(worker: Any) -> str:
    time.sleep(2.0)
    return "late"


def make_stage_inputs(worker: Any) -> None:
    """What vLLM's CPU runner makes in a warm-up that these engines go without."""
    runner = worker.model_runner
    if getattr(runner, "intermediate_tensors", 0) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


# --- what runs in the client's process


def together(a: str, b: str, kw: dict[str, Any], ranks: dict[str, int] = TP2) -> dict[str, Any]:
    """B in buckets; each bad update with the other rank's good one beside it; A to mend; B by reload."""
    with engines.open_llm(a, **ranks, **kw) as llm:
        llm.collective_rpc(make_stage_inputs)
        found: dict[str, Any] = dict(a=engines.answers(llm), bad={})
        llm.collective_rpc(load, args=(b, 5))
        found["b"] = engines.answers(llm)
        for bad in BAD:
            start = time.monotonic()
            bad_rank = 0 if bad == "missing" and ranks == PP2 else 1  # the stage that has the layer
            error = updates.error(lambda: llm.collective_rpc(load, args=(b, 3, bad, bad_rank)))
            seconds = time.monotonic() - start
            refusal = updates.refusal(llm)
            numbers = llm.collective_rpc(rank, args=(7,))
            llm.collective_rpc(load, args=(a,))
            found["bad"][bad] = dict(
                error=error, seconds=seconds, refusal=refusal, ranks=numbers, mended=engines.answers(llm)
            )
        found["failed call"] = _calls(llm)
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        found["reloaded"] = engines.answers(llm)
        found["late"] = _late(llm)
    return found


def _calls(llm: Any) -> dict[str, Any]:
    """A call that fails on rank 0, then one that does not."""
    error = updates.error(lambda: llm.collective_rpc(rank, args=(1, True)))
    return dict(error=error, next=llm.collective_rpc(rank, args=(2,)))


def _late(llm: Any) -> dict[str, Any]:
    """A call that runs out of time, then what may read its answers in the place of their own: a call, and requests."""
    error = updates.error(lambda: llm.collective_rpc(slow, timeout=0.2))
    after: list[Any] = []
    refused = updates.error(lambda: after.extend(llm.collective_rpc(rank, args=(3,))))
    return dict(error=error, next=after, refused=refused, answers=updates.error(lambda: engines.answers(llm)))


# --- the tests


@pytest.mark.parametrize(
    "kw",
    [
        dict(fork=True),
        *(
            pytest.param(dict(quantization=name), marks=pytest.mark.full)
            for name in (None, "fp8_per_channel")
        ),
    ],
    ids=["bf16-forked", "bf16", "fp8"],
)
def test_ranks_update_together_or_not_at_all(kw: dict[str, Any]) -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    got = scenario.run(together, a, b, kw, env={"FLASHPATCH": "bf16"}, timeout=500)
    fresh = oracle.answers(b, **TP2, **kw)
    assert engines.difference(got["b"], fresh).exact
    assert engines.difference(got["reloaded"], fresh).exact
    check_bad(got)
    assert "rank 0: ValueError: on purpose" in got["failed call"]["error"]
    assert got["failed call"]["next"] == [[2, 0], [2, 1]], "the failed call has left an answer behind"
    assert "timed out" in got["late"]["error"] and got["late"]["next"] == []
    for refusal in (got["late"]["refused"], got["late"]["answers"]):
        assert "ran out of time" in refusal and "Open the engine again" in refusal


@pytest.mark.full
def test_pipeline_stages_update_together_or_not_at_all() -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    got = scenario.run(together, a, b, {}, PP2, env={"FLASHPATCH": "bf16"}, timeout=500)
    fresh = oracle.answers(b)  # stages compute what one rank does
    assert engines.difference(got["b"], fresh).exact
    assert engines.difference(got["reloaded"], fresh).exact
    check_bad(got)


def check_bad(got: dict[str, Any]) -> None:
    """Each bad update was refused by name, in seconds, and mended by the next good one."""
    names = ("lost before it began", "down_proj.weight holds NaN", "k_proj", "connection broke")
    for bad, named in zip(BAD, names, strict=True):
        found = got["bad"][bad]
        assert named in (found["error"] or found["refusal"]), bad
        assert found["refusal"] is not None and "PatchError" in found["refusal"], bad
        assert found["seconds"] < PATIENCE, f"{bad}: the good rank waited"
        assert found["ranks"] == [[7, 0], [7, 1]], f"{bad}: an old answer was read"
        assert engines.difference(found["mended"], got["a"]).exact, bad
