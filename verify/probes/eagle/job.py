"""Run the probe's engine, on vLLM or SGLang, with its drafters in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flashpatch.verify.probes import jobs

MAX_DRAFTS = 3
TOKENS = 80
TURNS = 3
DRAFTERS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine gets them; it is opened with the first."""


class _Engine(NamedTuple):
    """Greedy tokens of each prompt; give the engine the drafter of a folder, with a version; what was captured."""

    generate: Callable[[], list[list[int]]]
    update: Callable[[Path, int], Any]
    flush: Callable[[], Any]


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Ask all prompts with each drafter in turn, `TURNS` times, and note the answers.

    A last update ends the judgement of the third drafter, so that its acceptance is in the ledger.
    """
    began = time.monotonic()
    engine = {"vllm": _vllm, "sglang": _sglang}[jobs.engine_here()](workdir)
    seen |= {"opened": time.monotonic() - began, "tokens": {}}
    for number, name in enumerate(DRAFTERS):
        if number:
            engine.update(workdir / name, number)
        seen["tokens"][name] = [engine.generate() for _ in range(TURNS)]
    engine.update(workdir / DRAFTERS[0], len(DRAFTERS))
    seen["captured"] = engine.flush()


def _vllm(workdir: Path) -> _Engine:
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    drafts = dict(method="eagle", model=str(workdir / DRAFTERS[0]), num_speculative_tokens=MAX_DRAFTS)
    target = workdir / "target"
    llm = LLM(**tiny.engine_arguments(target, max_num_batched_tokens=32, speculative_config=drafts))

    def generate() -> list[list[int]]:
        found = llm.generate(
            [{"prompt_token_ids": text} for text in prompts()],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(one.outputs[0].token_ids) for one in found]

    return _Engine(
        generate,
        lambda folder, version: llm.collective_rpc("eagle_update_drafter", args=(str(folder), version)),
        lambda: llm.collective_rpc("eagle_flush")[0],
    )


def _sglang(workdir: Path) -> _Engine:
    import sglang
    from safetensors.torch import load_file

    from flashpatch.patches.eagle.sglang import drafter_refit
    from flashpatch.verify.probes.eagle import tiny

    engine = sglang.Engine(**tiny.sglang_arguments(workdir / "target", workdir / DRAFTERS[0], MAX_DRAFTS))
    sampling = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    return _Engine(
        lambda: [one["output_ids"] for one in engine.generate(input_ids=prompts(), sampling_params=sampling)],
        lambda folder, version: drafter_refit.send(engine, load_file(folder / "model.safetensors").items()),
        lambda: None,
    )
