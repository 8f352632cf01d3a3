"""Measure an engine with the shapes of a 7B on a CUDA device: an update, and tokens per second.

    python -m cuda_lab.speed fresh|update CHECKPOINTS OUT PRECISION:update|PRECISION:tokens|drafter:tokens...

`fresh` is stock vLLM, `update` runs with FLASHPATCH set. Weights are drawn on the device, none is on a disk. On the fake device
the model is tiny and its times mean nothing.
"""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.model_executor.model_loader import base_loader

from cuda_lab import device, engine, results

SHAPES = dict(  # those of Qwen2.5-7B
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)
TINY = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=512,
)
PRECISIONS = {
    "bf16": None,
    "fp8": "fp8_per_tensor",
    "int8": None,
    "block": "fp8",
}  # int8: FlashPatch describes it to vLLM
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
"""As verl's ``rollout.quantization=fp8`` opens an engine."""
BATCHES, PROMPT, TOKENS = ((1, 4), 16, 4) if device.IS_FAKE else ((1, 64, 256), 16, 256)
ROUNDS = 4  # the first is not counted
BUCKET = 512 << 20
OURS = os.environ.get("FLASHPATCH", "0") not in ("", "0")
GIB = 1 << 30


def main(_mode: str, root: str, out: str, *names: str) -> None:
    for name in names:
        what, _, measured = name.partition(":")
        try:
            found = MEASURED[measured](Path(root), what)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        results.add(out, name, found)
    sys.stdout.flush()
    os._exit(0)  # destructors of CUDA libraries find no device


def update(root: Path, precision: str) -> dict[str, Any]:
    """Return the median seconds of an update from the device's own memory, and what it reserves of it, in GiB."""
    llm = opened(root, precision, {"enforce_eager": True})
    runner = engine.worker(llm).model_runner
    policy = [(name, torch.randn(shape, device="cuda").bfloat16() / 50) for name, shape in names(root)]
    seconds, peaks, held = [], [], []
    for _ in range(ROUNDS):
        for _, tensor in policy:
            tensor.neg_()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        (in_buckets if OURS else by_vllm)(runner, policy)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append((torch.cuda.max_memory_reserved() - reserved) / GIB)
        held.append((torch.cuda.memory_reserved() - reserved) / GIB)
    return {"seconds": statistics.median(seconds[1:]), "peak": max(peaks[1:]), "held": held[-1]}


def in_buckets(runner: Any, policy: list[tuple[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        for bucket in buckets(policy):
            runner.model.load_weights(bucket)
        base_loader.process_weights_after_loading(runner.model, runner.model_config, runner.device)


def by_vllm(runner: Any, policy: list[tuple[str, torch.Tensor]]) -> None:
    runner.reload_weights(weights_iterator=iter(policy))


def buckets(policy: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = [], 0
    for name, tensor in policy:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def tokens(root: Path, what: str) -> dict[str, Any]:
    """Return by batch how many tokens a second come, after a first round that is not counted."""
    if what == "drafter":
        from cuda_lab import drafts

        at = drafts.checkpoints(root)
        llm, vocabulary = drafts.opened(at["b"], at["exact"]), 32
        batches, count = (1, 4), min(TOKENS, 96)
    else:
        how = {"compilation_config": engine.GRAPHS} if device.IS_FAKE else {}
        llm, vocabulary = opened(root, what, how), TINY["vocab_size"]
        batches, count = BATCHES, TOKENS
    found = {}
    for batch in batches:
        prompts = [[3 + (7 * row + i) % (vocabulary - 3) for i in range(PROMPT)] for row in range(batch)]
        asked(llm, prompts, 2)
        start = time.perf_counter()
        asked(llm, prompts, count)
        found[batch] = batch * count / (time.perf_counter() - start)
    return found


def asked(llm: vllm.LLM, prompts: list[list[int]], count: int) -> None:
    sampling = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def opened(root: Path, precision: str, how: dict[str, Any]) -> vllm.LLM:
    arguments = {**engine.ENGINE, "max_model_len": 512, "max_num_seqs": max(BATCHES), **how}
    arguments |= {
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": (16 << 20) if device.IS_FAKE else 6 * GIB,
    }
    del arguments["max_logprobs"]
    if precision == "block":
        arguments["hf_overrides"] = {"quantization_config": BLOCK}
    return vllm.LLM(
        str(configured(root)), load_format="dummy", quantization=PRECISIONS[precision], **arguments
    )


def configured(root: Path) -> Path:
    """Write the model's configuration, which is all that there is of it, and return its folder."""
    folder = root / "speed"
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_act="silu",
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        **(TINY if device.IS_FAKE else SHAPES),
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def names(root: Path) -> list[tuple[str, torch.Size]]:
    """Return name and shape of each tensor of the model's checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(configured(root)))
    return [(name, tensor.shape) for name, tensor in model.state_dict().items()]


MEASURED: dict[str, Callable[[Path, str], dict[str, Any]]] = {"update": update, "tokens": tokens}

if __name__ == "__main__":
    main(*sys.argv[1:])
