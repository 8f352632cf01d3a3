"""The ids that a real engine says it kept are those that its sampling settings keep, and its probabilities are over them."""

import asyncio
from typing import Any

import kept_ids
import pytest
import vllm_updates as updates
from kept_ids import OTHERS, TOKENS, WIDTH
from vllm_lab import engines, scenario

pytestmark = pytest.mark.vllm

TRUNCATED = {
    "top_k": dict(temperature=1.0, top_k=10),
    "top_p": dict(temperature=1.4, top_k=WIDTH, top_p=0.8),
    "min_p": dict(temperature=0.7, top_k=12, min_p=0.1),
}


# --- what runs in the engine's process


def answers(model: str) -> dict[str, Any]:
    """Ask for one response per setting, all at once: its tokens, their log-probabilities, the ids that came with them."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import flashpatch
    from flashpatch.patches.fp8.vllm.kept_tokens import HELD

    flashpatch.enable("bf16", support=WIDTH)

    async def ask(engine: Any, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        held: list[Any] = []
        HELD.set(held)
        asked = SamplingParams(**settings, seed=5, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        async for output in engine.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, asked, name):
            last = output.outputs[0]
        logs = [at[token].logprob for token, at in zip(last.token_ids, last.logprobs, strict=True)]
        return dict(tokens=list(last.token_ids), logs=logs, kept=[ids.tolist() for ids in held])

    async def talk() -> dict[str, Any]:
        with engines.forked():
            made = AsyncEngineArgs(model=model, **{**engines.DEFAULTS, "dtype": "float32"})
            engine = AsyncLLM.from_engine_args(made)
        try:
            cases = {**TRUNCATED, **OTHERS}
            found = await asyncio.gather(*(ask(engine, *case) for case in cases.items()))
            return dict(zip(cases, found, strict=True))
        finally:
            engine.shutdown()

    return asyncio.run(talk())


# --- the test


def test_kept_ids_are_those_of_the_settings_and_probabilities_are_over_them():
    model = updates.checkpoint("qwen2", 0)
    found = scenario.run(answers, str(model))
    kept_ids.check(model, list(engines.PROMPTS[0]), found, TRUNCATED, whole=False)
