"""A process that holds one copy of the model and updates it when told.

    python -m reloading.worker KIND SIZE PRECISION FOLDER BUCKET_BYTES

KIND is ours or native. One JSON line in, {"way": ...}, one out. The ways: "one call" and "buckets"
(ours), "native"; "checksum" (ours) computes that of the weights in use; "answer" gives
log-probabilities of a fixed prompt. Each update brings the policy that the process does not hold yet."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_models as models

from reloading import meter


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, precision: str, folder: Path) -> None:
        from vllm import LLM
        from vllm.model_executor.models import registry

        # vLLM inspects architectures in a subprocess only to keep CUDA uninitialised in this one.
        registry._run_in_subprocess = lambda function: function()
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=None if precision == "bf16" else precision,
            max_model_len=128,
            max_num_seqs=2,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
        )
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        self.runner = executor.driver_worker.worker.model_runner

    def load(self, parts: Any) -> None:
        """As frameworks do that stream weights: load_weights for each part, and at last post-processing."""
        from vllm.model_executor.model_loader import utils

        model = self.runner.model
        for part in parts:
            model.load_weights(iter(part))
        utils.process_weights_after_loading(model, self.runner.model_config, self.runner.device)

    def native(self, policy: list) -> None:
        self.runner.reload_weights(weights_iterator=iter(policy))

    def checksum(self) -> None:
        import flashpatch

        flashpatch.checksum(self.llm)

    def answer(self) -> list[float]:
        """Log-probabilities of the 31 tokens of a fixed prompt, each after those before it."""
        from vllm import SamplingParams

        tokens = list(range(3, 35))
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate({"prompt_token_ids": tokens}, asked, use_tqdm=False)
        return [seen[token].logprob for token, seen in zip(tokens[1:], output.prompt_logprobs[1:])]


def _ways(kind: str, precision: str, folder: Path, limit: int) -> dict[str, Callable]:
    """Name -> function of a policy; "answer" apart."""
    engine = Engine(precision, folder)
    if kind == "native":
        return {"native": engine.native, "answer": engine.answer}
    return {
        "one call": lambda policy: engine.load([policy]),
        "buckets": lambda policy: engine.load(models.buckets(policy, limit)),
        "checksum": engine.checksum,
        "answer": engine.answer,
    }


def main() -> None:
    kind, name, precision, folder, limit = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to the log
    import torch

    size = next(size for size in models.SIZES if size.name == name)
    policies = models.Policies(size, Path(folder))
    ways = _ways(kind, precision, Path(folder), int(limit))
    turn = 0
    print(json.dumps({"threads": torch.get_num_threads()}), file=replies)
    for line in sys.stdin:
        way = json.loads(line)["way"]
        if way == "answer":
            reply = {"answer": ways[way]()}
        elif way == "checksum":
            reply = meter.measure(ways[way])
        else:
            turn += 1
            policies.resident()
            policy = policies.reversed if turn % 2 else policies.straight
            with torch.inference_mode():
                reply = {**meter.measure(lambda: ways[way](policy)), "policy": turn % 2}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
