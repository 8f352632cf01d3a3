"""Measure SGLang: seconds of an update as trainers send it, in each size of bucket, and tokens per second."""

import statistics
import time
from pathlib import Path

import sglang
import torch
from card.table import BATCHES, BUCKETS, DENSE, TOKENS
from felting import models
from random_models import buckets, configure

from cuda_lab import device

ROUNDS = 3
LENGTH = min(BATCHES)
# Without kernels of attention and captured graphs, of which the fake device has none of SGLang's.
FAKE = dict(
    disable_overlap_schedule=True,
    attention_backend="torch_native",
    disable_cuda_graph=True,
    disable_piecewise_cuda_graph=True,
)


def measured(row: str, root: Path, _ours: bool) -> dict[str, dict[str, float]]:
    """Return the seconds of an update by its buckets, and by batch the tokens a second, each the median of some rounds."""
    configure(DENSE, folder := root / f"sglang-{row}")
    models.MODELS["7B"] = DENSE
    engine, policy = opened(folder), models.policy("7B", "bf16")
    found = {}
    for way, limit in BUCKETS.items():
        updated(engine, policy, limit)  # what is made once
        found[way] = {"s": statistics.median(updated(engine, policy, limit) for _ in range(ROUNDS))}
    for batch in dict.fromkeys(BATCHES[LENGTH]):
        asked(engine, batch)
        rates = [batch * TOKENS[LENGTH] / asked(engine, batch) for _ in range(ROUNDS)]
        found[f"{batch} of {LENGTH}"] = {"tokens/s": statistics.median(rates)}
    engine.shutdown()
    return found


def opened(folder: Path) -> sglang.Engine:
    return sglang.Engine(
        model_path=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        max_running_requests=max(BATCHES[LENGTH]),
        max_total_tokens=max(BATCHES[LENGTH]) * (LENGTH + TOKENS[LENGTH] + 64),
        log_level="error",
        **(FAKE if device.IS_FAKE else {}),
    )


def updated(engine: sglang.Engine, policy: list[tuple[str, torch.Tensor]], limit: int) -> float:
    """Send a policy in buckets by CUDA IPC; return the seconds until the engine has answered the last."""
    parts, start = list(buckets(policy, limit)), time.perf_counter()
    for part in parts:
        is_right, said = engine.update_weights_from_tensor(part, flush_cache=part is parts[-1])
        assert is_right, said
    return time.perf_counter() - start


def asked(engine: sglang.Engine, batch: int) -> float:
    """Return the seconds until each of some requests has its tokens."""
    prompts = [[3 + (7 * row + 11 * i) % (DENSE.vocab - 3) for i in range(LENGTH)] for row in range(batch)]
    sampling, start = dict(temperature=0, max_new_tokens=TOKENS[LENGTH], ignore_eos=True), time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - start
