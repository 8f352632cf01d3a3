"""Train with TRL's GRPO, its colocated rollout engine in fp8, int8 or bf16.

    FLASHPATCH=fp8 python examples/trl_grpo.py [--model MODEL] [--steps N] [--out DIRECTORY]

Nothing in this script is FlashPatch's: the variable in front of it is all. Without ``--model`` a tiny random model is made,
which trains on a CPU in a minute; nothing is downloaded. The reward asks for large token ids, so that it rises soon.
Afterwards ``flashpatch-verify --live`` says what was live, and ``flashpatch report -o job.html`` draws the job.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

WORDS = 512


def main() -> None:
    """Read the options, make the model unless one is given, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's name or path; a tiny random one if this is left out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("trl_grpo"))
    options = parser.parse_args()
    os.environ.setdefault(
        "VLLM_CPU_KVCACHE_SPACE", "1"
    )  # GiB; without a GPU vLLM would take much of the memory
    train(options.model or make_model(options.out / "model"), options.steps, options.out)


def train(model: str, steps: int, out: Path) -> None:
    """Train with unmodified TRL; its trackers and FlashPatch's ledger get what it logs."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    on_cpu = not torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=1e-3,
        per_device_train_batch_size=64,
        num_generations=16,
        max_completion_length=8,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.2,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    prompts = [f"w{number} w{number + 1} w{number + 2}" for number in range(64)]
    GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
    ).train()


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the mean token id of each answer, as a share of the vocabulary."""
    return [sum(ids) / max(1, len(ids)) / WORDS for ids in completion_ids]


def make_model(folder: Path) -> str:
    """Write a random Qwen2 of two layers with a tokenizer of words ``w0`` to ``w511``; return its path."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
