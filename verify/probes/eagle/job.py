"""Run the probe's engine, on vLLM or SGLang, with its drafters in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs

MAX_DRAFTS = 3
TOKENS = 80
TURNS = 3
DRAFTERS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine gets them; it is opened with the first."""
_Engine = tuple[Callable[..., list[dict[str, Any]]], Callable[[Path, int], Any], Callable[[], Any]]
"""Answer prompts in one batch, each with its own parameters; give the engine the drafter of a folder, with a version; what was captured."""


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Note the answers to all prompts with each drafter in turn, `TURNS` times. A last update ends the judgement of the third
    drafter, so that its acceptance is in the ledger; then sampled requests are answered."""
    from flashpatch.verify import sampled

    began, engine, answers = time.monotonic(), jobs.engine_here(), list[dict[str, Any]]()
    generate, update, flush = {"vllm": _vllm, "sglang": _sglang}[engine](workdir)
    seen |= {"opened": time.monotonic() - began, "answers": answers}
    jobs.tell(workdir, f"an engine is open ({seen['opened']:.0f} s)")

    def ask(prompts: list[list[int]], asked: list[dict[str, float]]) -> None:
        found = zip(prompts, asked, generate(prompts, asked), strict=True)
        answers.extend(dict(prompt=prompt, asked=one, **answer) for prompt, one, answer in found)

    for number, name in enumerate(DRAFTERS):
        if number:
            update(workdir / name, number)
        for _ in range(TURNS):
            ask(prompts(), [sampled.GREEDY] * len(prompts()))
        jobs.tell(workdir, f"it has drafted with drafter {name}")
    update(workdir / DRAFTERS[0], len(DRAFTERS))
    for prompt, asked in sampled.batches(engine):
        ask([prompt] * len(asked), asked)
    jobs.tell(workdir, "it has answered sampled requests")
    seen["captured"] = flush()


def _vllm(workdir: Path) -> _Engine:
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    drafts = dict(method="eagle", model=str(workdir / DRAFTERS[0]), num_speculative_tokens=MAX_DRAFTS)
    target = workdir / "target"
    llm = LLM(**tiny.engine_arguments(target, max_num_batched_tokens=32, speculative_config=drafts))
    common = dict(max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)

    def generate(prompts: list[list[int]], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [{"prompt_token_ids": text} for text in prompts]
        found = llm.generate(texts, [SamplingParams(**common, **one) for one in asked], use_tqdm=False)
        answers = [one.outputs[0] for one in found]
        scores = [[row[token].logprob for token, row in zip(one.token_ids, one.logprobs)] for one in answers]
        return [dict(tokens=list(one.token_ids), logprobs=row) for one, row in zip(answers, scores)]

    def update(folder: Path, version: int) -> None:
        llm.collective_rpc("eagle_update_drafter", args=(str(folder), version))

    return generate, update, lambda: llm.collective_rpc("eagle_flush")[0]


def _sglang(workdir: Path) -> _Engine:
    import sglang

    from flashpatch.patches.eagle import verl_sglang
    from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, UPDATE
    from flashpatch.verify.probes.eagle import tiny

    engine = sglang.Engine(**tiny.sglang_arguments(workdir / "target", workdir / DRAFTERS[0], MAX_DRAFTS))
    common = dict(max_new_tokens=TOKENS, ignore_eos=True)

    def generate(prompts: list[list[int]], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sampling = [dict(common, **one) for one in asked]
        found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        scores = [[row[0] for row in one["meta_info"]["output_token_logprobs"]] for one in found]
        return [dict(tokens=one["output_ids"], logprobs=row) for one, row in zip(found, scores)]

    def call(method: str, *given: Any) -> Any:
        return engine.loop.run_until_complete(verl_sglang.eagle_call(engine, method, given))[0]

    def update(folder: Path, version: int) -> None:
        call(FLUSH)  # a turn later the scheduler lists the answered requests no more
        call(UPDATE, str(folder), version)

    return generate, update, lambda: call(FLUSH)
