"""Open a tiny SGLang engine, update it and collect its answers: the standard job of probes on SGLang."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flashpatch.patches.fp8.update.events import REQUESTS_RUN
from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.answers import PROMPTS, TOKENS, buckets

NAME, ENTRY, RELOAD = "sglang", "Engine", "update_weights_from_disk"
IN_ONE: dict[str, str] = {}
APART: dict[str, str] = {}
NO_PINNED_MEMORY = "SGLang's LoRA layers ask torch for pinned memory (sglang/srt/lora/layers.py), which it has with an accelerator alone"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BUSY_SECONDS = 10.0  # seconds


def arguments(model: str | Path, **more: Any) -> dict[str, Any]:
    """Return keywords of ``sglang.Engine``: small, eager, no tokenizer."""
    return {"model_path": str(model), **jobs.given()["sglang"], **more}


class Engine:
    """An ``sglang.Engine``; its scheduler runs in another process."""

    def __init__(self, model: Path, adapters: int = 0, stock: bool = False, **more: Any) -> None:
        import sglang

        if adapters:
            more |= dict(enable_lora=True, max_lora_rank=8, lora_target_modules=list(ADAPTED), **_lora())
        self.engine = sglang.Engine(**arguments(model, **more))

    def precision(self) -> Mapping[str, Any]:
        """Return the keywords with which stock SGLang opens a checkpoint in this engine's precision."""
        from flashpatch import ledger

        return {} if ledger.notes().get("precision", "") in ("", "bf16") else {"quantization": "fp8"}

    def update(self, checkpoint: Path, finish: bool = True) -> None:
        """Send a checkpoint in buckets that cut every fused layer."""
        self.send(buckets(checkpoint))

    def send(self, weights: Iterable[list[tuple[str, Any]]]) -> None:
        """Send buckets as one update, which ends with the first that is refused."""
        engine = self.engine
        sessions = hasattr(engine, "begin_weight_update")  # 0.5.12: an update ends with its last tensor
        if sessions:
            _when_idle(engine.begin_weight_update)
        try:
            for bucket in weights:
                _when_idle(functools.partial(engine.update_weights_from_tensor, bucket, flush_cache=False))
        finally:
            ended = engine.end_weight_update() if sessions else (True, "")
        _check(*ended)

    def reload(self, checkpoint: Path) -> None:
        _when_idle(lambda: self.engine.update_weights_from_disk(str(checkpoint))[:2])

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter under a name, in place of the one that has it."""

        def load() -> tuple[bool, str]:
            answer = self.engine.load_lora_adapter(name, str(folder))
            return answer.success, answer.error_message

        _when_idle(load)

    def answers(self, adapter: str = "") -> list[list[float]]:
        """Return per prompt the logprobs of its tokens, then those of a greedy continuation, one request at a time; under
        an adapter if one is named. The prefix cache may be used."""
        found = []
        for prompt in PROMPTS:
            info = self.engine.generate(
                input_ids=prompt,
                sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True),
                return_logprob=True,
                logprob_start_len=0,
                **({"lora_path": adapter} if adapter else {}),
            )["meta_info"]
            triples = info["input_token_logprobs"][1:] + info["output_token_logprobs"]
            found.append([triple[0] for triple in triples])
        return found

    def generate(
        self, prompts: list[list[int]], asked: list[dict[str, Any]], tokens: int
    ) -> list[dict[str, Any]]:
        """Return so many tokens and their logprobs for each prompt of a batch, sampled as is asked for each."""
        sampling = [dict(one, max_new_tokens=tokens, ignore_eos=True) for one in asked]
        found = self.engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        scores = [[row[0] for row in one["meta_info"]["output_token_logprobs"]] for one in found]
        return [dict(tokens=one["output_ids"], logprobs=row) for one, row in zip(found, scores)]

    def call(self, method: str, *given: Any) -> Any:
        """Return what the first scheduler answers to a command of FlashPatch."""
        from flashpatch.patches.eagle import verl_sglang

        return self.engine.loop.run_until_complete(verl_sglang.eagle_call(self.engine, method, given))[0]

    def close(self) -> None:
        self.engine.shutdown()

    def look(self) -> dict[str, Any]:
        """Return nothing: no extension runs on SGLang's workers."""
        return {}


def _lora() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return {}
    try:
        torch.zeros(1, pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(NO_PINNED_MEMORY) from error
    return {"lora_backend": "torch_native"}  # the others are in Triton


def _when_idle(update: Callable[[], tuple[bool, str]]) -> None:
    """Call an update, again for a moment: SGLang answers a request before its scheduler forgets it."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        done, message = update()
        if done or REQUESTS_RUN not in message or time.monotonic() > end:
            return _check(done, message)
        time.sleep(0.1)


def _check(done: bool, message: str) -> None:
    if not done:
        raise RuntimeError(message)
