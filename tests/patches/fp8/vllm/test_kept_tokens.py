"""The ids that a real engine says it kept are those that its sampling settings keep, and its probabilities are over them."""

import asyncio
import math
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, scenario

pytestmark = pytest.mark.vllm

TOKENS, WIDTH = 24, 16
TRUNCATED = {
    "top_k": dict(temperature=1.0, top_k=10),
    "top_p": dict(temperature=1.4, top_k=WIDTH, top_p=0.8),
    "min_p": dict(temperature=0.7, top_k=12, min_p=0.1),
}
OTHERS = {
    "greedy": dict(temperature=0.0, top_k=10),
    "whole": dict(temperature=1.0),
    "wider": dict(temperature=1.0, top_k=WIDTH + 1),
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


def kept_by_definition(logits: Any, top_k: int, top_p: float = 1.0, min_p: float = 0.0, **_: Any) -> set[int]:
    """The ids with the ``top_k`` largest logits; of these, renormalized, the fewest that reach ``top_p``; none below
    ``min_p`` times the likeliest's probability."""
    likeliest = logits.topk(top_k).indices.tolist()
    found, mass = [], 0.0
    probs = dict(zip(likeliest, logits[likeliest].softmax(-1).tolist(), strict=True))
    for id in likeliest:
        if mass >= top_p or probs[id] < min_p * probs[likeliest[0]]:
            break
        found.append(id)
        mass += probs[id]
    return set(found)


def test_kept_ids_are_those_of_the_settings_and_probabilities_are_over_them():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from flashpatch.patches.fp8.support.kept import renormalized

    model = updates.checkpoint("qwen2", 0)
    found = scenario.run(answers, str(model))
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, settings in TRUNCATED.items():
        tokens, logs, kept = (found[name][key] for key in ("tokens", "logs", "kept"))
        sequence = [*engines.PROMPTS[0], *tokens]
        with torch.no_grad():
            logits = trainer(torch.tensor([sequence])).logits[0, -TOKENS - 1 : -1] / settings["temperature"]
        wanted = [kept_by_definition(row, **settings) for row in logits]
        assert [set(ids) for ids in kept] == wanted, name
        assert len(kept) == TOKENS == len(logs) and (name == "top_k" or len(set(map(len, kept))) > 1)
        rows = torch.tensor([[*ids, *[-1] * (WIDTH - len(ids))] for ids in kept])
        labels, rolled = torch.tensor(tokens), torch.tensor(logs)
        ours = renormalized(logits, labels, rows)
        assert (ours - rolled).abs().max() < 1e-4, name  # a ratio of 1
        plain = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        assert (plain - rolled).max() < math.log(0.95), name  # what a trainer has without: the kept mass
    assert not any(found[name]["kept"] for name in OTHERS)
