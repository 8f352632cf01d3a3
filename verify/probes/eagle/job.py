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
_Engine = tuple[Callable[[], list[list[int]]], Callable[[Path, int], Any], Callable[[], Any]]
"""Greedy tokens of each prompt; give the engine the drafter of a folder, with a version; what was captured."""


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Note the answers to all prompts with each drafter in turn, `TURNS` times. A last update ends the judgement of the third
    drafter, so that its acceptance is in the ledger."""
    began = time.monotonic()
    generate, update, flush = {"vllm": _vllm, "sglang": _sglang}[jobs.engine_here()](workdir)
    seen |= {"opened": time.monotonic() - began, "tokens": {}}
    jobs.tell(workdir, f"an engine is open ({seen['opened']:.0f} s)")
    for number, name in enumerate(DRAFTERS):
        if number:
            update(workdir / name, number)
        seen["tokens"][name] = [generate() for _ in range(TURNS)]
        jobs.tell(workdir, f"it has drafted with drafter {name}")
    update(workdir / DRAFTERS[0], len(DRAFTERS))
    seen["captured"] = flush()


def _vllm(workdir: Path) -> _Engine:
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    drafts = dict(method="eagle", model=str(workdir / DRAFTERS[0]), num_speculative_tokens=MAX_DRAFTS)
    target = workdir / "target"
    llm = LLM(**tiny.engine_arguments(target, max_num_batched_tokens=32, speculative_config=drafts))

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def generate() -> list[list[int]]:
        texts = [{"prompt_token_ids": text} for text in prompts()]
        return [list(one.outputs[0].token_ids) for one in llm.generate(texts, sampling, use_tqdm=False)]

    def update(folder: Path, version: int) -> None:
        llm.collective_rpc("eagle_update_drafter", args=(str(folder), version))

    return generate, update, lambda: llm.collective_rpc("eagle_flush")[0]


def _sglang(workdir: Path) -> _Engine:
    import sglang
    from safetensors.torch import load_file

    from flashpatch.patches.eagle.sglang import drafter_refit
    from flashpatch.verify.probes.eagle import tiny

    engine = sglang.Engine(**tiny.sglang_arguments(workdir / "target", workdir / DRAFTERS[0], MAX_DRAFTS))
    sampling = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)

    def generate() -> list[list[int]]:
        found = engine.generate(input_ids=prompts(), sampling_params=sampling)
        return [one["output_ids"] for one in found]

    def update(folder: Path, version: int) -> None:
        drafter_refit.send(engine, load_file(folder / "model.safetensors").items())

    return generate, update, lambda: None
