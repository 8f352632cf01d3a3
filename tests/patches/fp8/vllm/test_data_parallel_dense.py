"""Two dense engines behind one front end: an update reaches both, and one that reaches a single one is named.

vLLM opens dense data parallelism behind its server's `AsyncLLM` alone; offline it refuses it."""

import asyncio
import time
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario

pytestmark = [pytest.mark.vllm(least="0.32"), pytest.mark.full]


def load(worker: Any, path: str, engines: list[int]) -> None:
    """Load a checkpoint in a worker, if its engine is one of these."""
    if worker.parallel_config.data_parallel_index in engines:
        worker.model_runner.model.load_weights(models.weights(path))


async def _tokens(front: Any) -> list[list[list[int]]]:
    """Return each engine's greedy tokens for every prompt."""
    sampling = engines.sampling()

    async def ask(prompt: tuple[int, ...], rank: int) -> list[int]:
        name = f"{rank}-{prompt[0]}-{time.monotonic_ns()}"
        asked = front.generate({"prompt_token_ids": list(prompt)}, sampling, name, data_parallel_rank=rank)
        *_, last = [output async for output in asked]
        return engines.tokens_of(last)

    return [[await ask(prompt, rank) for prompt in engines.PROMPTS] for rank in (0, 1)]


async def _session(model: str, sent: list[tuple[str, list[int]]]) -> dict[str, Any]:
    """Ask both engines at the start and after each checkpoint that some of them are sent; what the ledger says each time."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from flashpatch import ledger
    from flashpatch.ledger import files
    from flashpatch.verify import policy_versions

    def splits() -> list[str]:
        rows = [row for run in ledger.read() if run.id == files.run_id() for row in run.rows]
        return policy_versions.splits(rows, {})

    arguments = {**engines.DEFAULTS, "data_parallel_size": 2, "skip_tokenizer_init": True}
    with engines.forked():
        front = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
    try:
        found: dict[str, Any] = dict(tokens=[await _tokens(front)], splits=[])
        for path, to in sent:
            await front.collective_rpc(load, args=(path, to))
            found["tokens"].append(await _tokens(front))
            await asyncio.sleep(1.5)  # rows are written once a second
            found["splits"].append(splits())
        return found
    finally:
        front.shutdown()


def run(model: str, sent: list[tuple[str, list[int]]]) -> dict[str, Any]:
    """Run a session, with FlashPatch if something is sent."""
    import flashpatch

    if sent:
        flashpatch.enable("bf16")
    return asyncio.run(_session(model, sent))


def test_both_follow_an_update_and_one_alone_is_named() -> None:
    a, b = updates.checkpoint("llama", 0), updates.checkpoint("llama", 1)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    [[of_a, _]] = scenario.run(run, a, [], env=env)["tokens"]
    [[of_b, _]] = scenario.run(run, b, [], env=env)["tokens"]
    assert of_a != of_b
    got = scenario.run(run, a, [(b, [0, 1]), (a, [0])], env=env)
    assert got["tokens"] == [[of_a, of_a], [of_b, of_b], [of_a, of_b]]
    whole, [split] = got["splits"]
    assert not whole
    assert split.startswith("the ranks of one engine hold several policy versions: 1 in rank 0, dp 1")
