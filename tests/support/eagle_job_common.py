"""Share what the jobs of `eagle_jobs` need: engines, prompts, a fixed policy, refusals, and the end of a job."""

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any


class Cycle:
    """Choose another number of tokens at every step, 0 among them."""

    def __init__(self, numbers: list[int]) -> None:
        from flashpatch.patches.eagle.bandit.arm import Arm

        self.arms = itertools.cycle([Arm(k, 1, k + 1) if k else Arm.DISABLE for k in numbers])
        self.updates: list[tuple[int, str, float]] = []
        self.refreshed = 0

    def select(self, batch_size: int) -> Any:
        return next(self.arms)

    def update(self, batch_size: int, arm: Any, tokens: float, seconds: float) -> None:
        self.updates.append((batch_size, str(arm), tokens))

    def metrics(self) -> dict[str, float]:
        return {}

    pulls = metrics

    def refresh(self) -> None:
        self.refreshed += 1


def prompts() -> list[list[int]]:
    noise = random.Random(3)
    return [[noise.randrange(3, 32) for _ in range(length)] for length in (5, 17, 33, 60, 3, 90, 12)]


def opened(
    target: Path, drafter: Path | None = None, method: str = "eagle", drafts: int = 3, **more: Any
) -> Any:
    """Open an engine on a tiny target, which speculates if there is a drafter."""
    from vllm import LLM

    from flashpatch.verify.probes.eagle import tiny

    if drafter is not None:
        more["speculative_config"] = dict(method=method, model=str(drafter), num_speculative_tokens=drafts)
    return LLM(**tiny.engine_arguments(target, **more))


def core_of(llm: Any) -> Any:
    """Return the engine core of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


def controller_of(llm: Any) -> Any:
    from flashpatch.patches.eagle.vllm import spec_controller

    return spec_controller.controller_of(core_of(llm).scheduler)


def sampling(**changed: Any) -> Any:
    """Greedy sampling that no token ends, if nothing else is said."""
    from vllm import SamplingParams

    return SamplingParams(**{**dict(temperature=0, ignore_eos=True, detokenize=False), **changed})


def generate(llm: Any, texts: list[list[int]], **changed: Any) -> list[Any]:
    given = [{"prompt_token_ids": text} for text in texts]
    return llm.generate(given, sampling(**changed), use_tqdm=False)


def begin(llm: Any, name: str, texts: list[list[int]], tokens: int, steps: int) -> None:
    """Let requests of this name and a number run for some steps."""
    for number, text in enumerate(texts):
        llm.llm_engine.add_request(
            f"{name}-{number}", {"prompt_token_ids": text}, sampling(max_tokens=tokens)
        )
    for _ in range(steps):
        llm.llm_engine.step()


def tokens_of(found: list[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in found]


def row_of(one: Any) -> dict[str, Any]:
    """Return an answer's prompt, tokens and their logprobs."""
    output = one.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(output.logprobs or [], output.token_ids)]
    return dict(prompt=one.prompt_token_ids, tokens=list(output.token_ids), logprobs=logprobs)


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def settle(queue: Path, counts: dict[str, Any]) -> None:
    import time

    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    deadline = time.monotonic() + 200  # reached only where samples were lost
    while len(SampleReader(queue).waiting()) < counts["requests"] and time.monotonic() < deadline:
        time.sleep(0.05)


def flush(llm: Any, at: Path) -> dict[str, Any]:
    """Wait until all samples are written; return what was counted."""
    [counts] = llm.collective_rpc("eagle_flush")
    settle(at / "queue", counts)
    return counts


def leave(at: Path, seen: dict[str, Any]) -> None:
    import psutil

    (at / "seen.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):  # else they keep our output open
        child.kill()
    os._exit(0)  # vLLM's shutdown takes seconds
