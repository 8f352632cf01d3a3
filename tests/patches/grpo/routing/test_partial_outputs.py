"""What vLLM's own asynchronous engine generates reaches the journal while it comes, and the engine's outputs stay."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import vllm_updates as updates
from vllm_lab import engines, scenario

EVERY, TOKENS = 5, 23


def reports(model: str) -> dict[str, Any]:
    """Requests with and without a server of verl's around them, and what the journal was told of them."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import flashpatch
    from flashpatch.patches.grpo.routing import journal

    stock = AsyncLLM.generate
    flashpatch.enable("grpo", journal=EVERY)
    patched = AsyncLLM.generate
    told: list[tuple[Any, ...]] = []
    held = journal.Journal()

    def add(*given: Any) -> None:
        told.append(given)
        held.add(*given)

    server = SimpleNamespace(
        global_steps=3, _flashpatch_grpo_journal=SimpleNamespace(add=SimpleNamespace(remote=add))
    )
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )

    lengths: list[int] = []

    async def answer(request_id: str, engine: Any) -> tuple[list[int], list[float]]:
        lengths.clear()
        async for output in engine.generate(
            prompt={"prompt_token_ids": list(engines.PROMPTS[0])},
            sampling_params=sampling,
            request_id=request_id,
            lora_request=None,
            priority=0,
        ):
            last = output.outputs[0]
            lengths.append(len(last.token_ids))
        tokens = list(last.token_ids)
        return tokens, [at[token].logprob for token, at in zip(tokens, last.logprobs, strict=True)]

    async def talk() -> dict[str, Any]:
        with engines.forked():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engines.DEFAULTS))
        try:
            alone = await answer("alone", engine)
            without = len(told)
            served = await journal.server_generate(lambda self: answer("served", engine), server)
        finally:
            engine.shutdown()
        return dict(alone=alone, served=served, without=without)

    found = asyncio.run(talk())
    flashpatch.disable("grpo")
    return dict(
        found,
        lengths=lengths,
        ends=[start + len(tokens) for _, start, tokens, *_ in told],
        held=held.take("served"),
        patched=patched is not stock,
        restored=AsyncLLM.generate is stock,
    )


def reported_at(lengths: list[int]) -> list[int]:
    """Lengths at which reports are due; the engine's outputs may hold several tokens where their reader is slow."""
    due = [0]
    for length in lengths:
        if length - due[-1] >= EVERY or (length == TOKENS and due[-1]):
            due.append(length)
    return due[1:]


async def outputs(*lengths: int, finish: str | None = "stop") -> AsyncIterator[SimpleNamespace]:
    """Outputs of one response with these many tokens, the last of which ends it."""
    for length in lengths:
        ends = finish if length == lengths[-1] else None
        one = SimpleNamespace(token_ids=list(range(length)), logprobs=None, finish_reason=ends)
        yield SimpleNamespace(outputs=[one])


@pytest.mark.parametrize(
    "lengths, finish, expected",
    [
        ((1, 2, 3), "stop", []),
        ((3, 6, 7, 11, 12), "stop", [(0, 6, None), (6, 5, None), (11, 1, "completed")]),
        ((3, 6, 7), "abort", [(0, 6, None)]),
        ((9,), "length", [(0, 9, "completed")]),
    ],
)
def test_a_report_holds_what_came_since_the_last(lengths: Any, finish: str, expected: Any) -> None:
    from flashpatch.patches.grpo.routing import journal

    told: list[tuple[Any, ...]] = []
    to = SimpleNamespace(add=SimpleNamespace(remote=lambda *given: told.append(given)))

    async def read() -> int:
        server = SimpleNamespace(global_steps=3)
        given = journal.reported(outputs(*lengths, finish=finish), to, "r", EVERY, server)
        return len([output async for output in given])

    assert asyncio.run(read()) == len(lengths)
    assert [(start, len(tokens), reason) for _, start, tokens, _, _, reason in told] == expected


@pytest.mark.vllm
def test_tokens_are_reported_while_they_come() -> None:
    found = scenario.run(reports, updates.checkpoint("qwen2", 0))
    assert found["served"] == found["alone"] and found["without"] == 0
    assert found["patched"] and found["restored"]
    assert found["ends"] == reported_at(found["lengths"])
    tokens, logprobs = found["served"]
    assert found["held"] == {
        "tokens": tokens,
        "logprobs": logprobs,
        "versions": [[3, TOKENS]],
        "stop_reason": "completed",
    }
