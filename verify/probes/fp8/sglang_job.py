"""Run an engine of the SGLang probe as a user's program would."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch.patches.fp8.refit.errors import REQUESTS_RUN

TOKENS = 6
"""Of each answer, after its prompt."""
_BUCKETS = 5
_BUSY_SECONDS = 10.0  # seconds
_LAST_ROW = 1.5  # seconds until every process has written its last row
_PROMPTS = tuple(list(range(start, 512, 9)) for start in range(3))


def main() -> None:
    """``python -c ... NAME WORKDIR``: ``job`` opens model a and updates it, ``fresh`` opens b and answers."""
    name, workdir = sys.argv[1], Path(sys.argv[2])
    seen: dict[str, Any] = {"answers": {}}
    try:
        _run(name, workdir, seen)
    except BaseException as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / f"{name}.json").write_text(json.dumps(seen))
    time.sleep(_LAST_ROW)
    os._exit(0)  # the probe ends what is left of this session


def _run(name: str, workdir: Path, seen: dict[str, Any]) -> None:
    import sglang

    a, b = str(workdir / "a"), str(workdir / "b")
    arguments = engine_arguments(a if name == "job" else b)
    if name == "fresh":
        wanted = workdir / "quantization"
        deadline = time.monotonic() + 300
        while not wanted.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        arguments["quantization"] = wanted.read_text() or None
    engine = sglang.Engine(**arguments)
    if name == "job":
        from flashpatch import ledger

        precision = ledger.notes().get("precision", "")
        chosen = "" if precision in ("", "bf16") else "fp8"
        draft = workdir / ".quantization"
        draft.write_text(chosen)
        draft.replace(workdir / "quantization")
    seen["answers"]["before"] = answers(engine)
    if name == "fresh":
        return
    update(engine, a)
    seen["answers"]["identity"] = answers(engine)
    update(engine, b)
    seen["answers"]["perturbation"] = answers(engine)
    when_idle(lambda: engine.update_weights_from_disk(a)[:2])
    seen["answers"]["return"] = answers(engine)


def engine_arguments(model: str, **more: Any) -> dict[str, Any]:
    """Keywords of ``sglang.Engine``: small, eager, no tokenizer."""
    return dict(
        model_path=model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        max_total_tokens=4096,
        max_running_requests=4,
        mem_fraction_static=0.95,  # other processes take memory meanwhile
        grammar_backend="none",
        skip_server_warmup=True,
        random_seed=0,
        log_level="warning",
        **more,
    )


def update(engine: Any, checkpoint: str) -> None:
    """Send a checkpoint's weights in buckets that cut every fused layer."""
    from safetensors import safe_open

    sessions = hasattr(engine, "begin_weight_update")  # 0.5.12: an update ends with its last tensor
    if sessions:
        when_idle(engine.begin_weight_update)
    with safe_open(f"{checkpoint}/model.safetensors", framework="pt") as tensors:
        names = sorted(tensors.keys())
        # Neighbours, as shards of a fused layer are, come in different buckets.
        for bucket in range(_BUCKETS):
            pairs = [(name, tensors.get_tensor(name)) for name in names[bucket::_BUCKETS]]
            when_idle(functools.partial(engine.update_weights_from_tensor, pairs, flush_cache=False))
    if sessions:
        _check(*engine.end_weight_update())


def when_idle(update: Callable[[], tuple[bool, str]]) -> None:
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


def answers(engine: Any, **asked: Any) -> list[list[float]]:
    """Return logprobs of prompts, then of greedy continuations that may use the prefix cache; one request at a time.

    ``asked`` is what each request asks for besides, such as ``lora_path``.
    """
    found = []
    for prompt in _PROMPTS:
        info = engine.generate(
            input_ids=prompt,
            sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True),
            return_logprob=True,
            logprob_start_len=0,
            **asked,
        )["meta_info"]
        found.append(
            [triple[0] for triple in info["input_token_logprobs"][1:] + info["output_token_logprobs"]]
        )
    return found
