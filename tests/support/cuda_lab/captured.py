"""Capture hidden states from an engine with graphs: does the head, applied to each state, choose the token that the engine chose?

    python -m cuda_lab.captured update CHECKPOINTS OUT graphs|defaults...

Each name is how the engine opens, a step of `cuda_lab.engine`. FlashPatch records every request."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm_lab import models

from cuda_lab import cases, checkpoints, engine, results

TOKENS = 12
CLOSE = 0.05  # a choice between two logits that near may fall either way


def main(_mode: str, root: str, out: str, *names: str) -> None:
    import flashpatch

    queue = f"{out}-samples"
    flashpatch.enable("eagle", strict=True, samples=queue)
    policy, _ = checkpoints.pair(Path(root), "llama")
    weights = dict(models.weights(policy))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    for name in names:
        llm = engine.opened(cases.CASES["bf16"], policy, (name,))
        answers = engine.ask(llm, count=TOKENS)
        engine.ask(llm, count=1)  # with a later step the workers hear which tokens a request kept
        llm.collective_rpc("eagle_flush")
        results.add(out, name, _found(Path(queue), answers, head))
        del llm
        cleanup_dist_env_and_memory()
        type(current_platform)._global_graph_pool = None  # it ended with the engine's graphs
    results.leave()


def _found(queue: Path, answers: list, head: torch.Tensor) -> dict[str, Any]:
    """Return how many requests came, how many states of generated tokens, and how many of these name another token."""
    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    reader, end = SampleReader(queue), time.monotonic() + 30
    while len(reader.waiting()) < len(answers) and time.monotonic() < end:
        time.sleep(0.1)
    samples, states, wrong = reader.read_samples(1000), 0, 0
    for sample in samples:
        for at in range(len(sample) - 1):
            if sample.known[at] and sample.response[at + 1]:
                logits = head @ sample.hidden[at].float()
                states += 1
                wrong += bool(logits.max() - logits[sample.input_ids[at + 1]] > CLOSE)
    said = {tuple(tokens) for tokens, _ in answers}
    came = sum(tuple(sample.input_ids[sample.response].tolist()) in said for sample in samples)
    return {"requests": len(answers), "came": came, "states": states, "wrong": wrong}


if __name__ == "__main__":
    main(*sys.argv[1:])
