"""Measure an engine with the shapes of a 7B on a CUDA device: tokens per second.

    python -m cuda_lab.speed fresh|update CHECKPOINTS OUT PRECISION:tokens|drafter:tokens...

`fresh` is stock vLLM, `update` runs with FLASHPATCH set. Weights are drawn on the device, none is on a disk. On the fake device
the model is tiny and its times mean nothing."""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import vllm

from cuda_lab import device, engine, results

SHAPES = dict(  # those of Qwen2.5-7B
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)
TINY = dict(hidden_size=128, intermediate_size=256, vocab_size=512)
TINY |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
# int8: FlashPatch describes it to vLLM.
PRECISIONS = {"bf16": None, "fp8": "fp8_per_tensor", "int8": None, "block": "fp8"}
BLOCK = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128])
"""As verl's ``rollout.quantization=fp8`` opens an engine."""
BATCHES, PROMPT, TOKENS = ((1, 4), 16, 4) if device.IS_FAKE else ((1, 64, 256), 16, 256)
GIB = 1 << 30


def main(_mode: str, root: str, out: str, *names: str) -> None:
    for name in names:
        try:
            found = tokens(Path(root), name.partition(":")[0])
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        results.add(out, name, found)
    results.leave()


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


if __name__ == "__main__":
    main(*sys.argv[1:])
