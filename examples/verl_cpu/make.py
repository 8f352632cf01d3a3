"""A tiny world to train in: sums of two digits, a byte tokenizer, a model of a few hundred thousand weights.

    python make.py DIRECTORY [--supervise STEPS] [--stop-at LOSS] [--largest DIGIT]

writes ``model/`` (Qwen2, Hugging Face format, with tokenizer and chat template), ``train.parquet`` and
``test.parquet`` in verl's format. With ``--supervise`` the model is first taught, so that its answers are
sometimes right and a reward has something to strengthen. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the chat's special tokens."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_max_length=1024,
        chat_template=TEMPLATE,
    )


def model(vocabulary: int, hidden: int = 128, layers: int = 2) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights. Its vocabulary is exactly the tokenizer's: verl masks what lies beyond."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def problem(draw: random.Random, largest: int) -> tuple[str, str]:
    """A question and its answer."""
    a, b = draw.randint(0, largest), draw.randint(0, largest)
    return f"{a}+{b}=", str(a + b)


def rows(number: int, draw: random.Random, largest: int) -> pandas.DataFrame:
    """``number`` problems in verl's format."""
    problems = [problem(draw, largest) for _ in range(number)]
    return pandas.DataFrame(
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer) in enumerate(problems)
    )


def supervise(
    pupil: Qwen2ForCausalLM,
    words: PreTrainedTokenizerFast,
    ask: Callable[[random.Random, int], tuple[str, str]],
    steps: int,
    draw: random.Random,
    largest: int,
    stop_at: float,
) -> None:
    """Teach the model what ``ask`` asks, for ``steps`` batches of 64, or until its loss per token is ``stop_at``."""
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=2e-3)
    started, mean = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        texts, prompts = [], []
        for _ in range(64):
            question, answer = ask(draw, largest)
            prompt = words.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            prompts.append(len(words(prompt).input_ids))
            texts.append(f"{prompt}{answer}<|end|>")
        batch = words(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for row, length in zip(labels, prompts, strict=True):
            row[:length] = -100
        loss = pupil(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.9 * mean + 0.1 * loss.item() if step > 1 else loss.item()
        enough = mean < stop_at
        if step % 50 == 0 or step == steps or enough:
            seconds = time.monotonic() - started
            print(f"   lesson {step}/{steps}: loss {mean:.3f}, {seconds:.0f} s", flush=True)
        if enough:
            return


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--supervise", type=int, default=0, metavar="STEPS")
    parser.add_argument("--stop-at", type=float, default=0.0, metavar="LOSS")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--largest", type=int, default=9, metavar="DIGIT")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    draw = random.Random(chosen.seed)
    words = tokenizer()
    pupil = model(len(words), chosen.hidden, chosen.layers)
    if chosen.supervise:
        supervise(pupil, words, problem, chosen.supervise, draw, chosen.largest, chosen.stop_at)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    pupil.save_pretrained(chosen.directory / "model")
    words.save_pretrained(chosen.directory / "model")
    rows(chosen.problems, draw, chosen.largest).to_parquet(chosen.directory / "train.parquet")
    rows(64, draw, chosen.largest).to_parquet(chosen.directory / "test.parquet")


if __name__ == "__main__":
    main()
