"""Teach a small Llama the language of `language.py`, and go on teaching it while the language drifts.

    python policies.py DIRECTORY ROUNDS LESSONS MORE

writes ``policy-00``, taught ``LESSONS`` batches of the first dialect, and ``policy-01`` ... one per round, each
taught ``MORE`` batches of a mixture that moves on to the last dialect: what a policy is to an engine over the
steps of a training run. They are made beforehand so that every run of the example meets the very same ones.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from language import VOCABULARY, Drift
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS = 128, 6
BATCH, LENGTH = 16, 128
RATE, WARM = 2e-3, 30


def make() -> LlamaForCausalLM:
    """A Llama of a million weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).to(torch.float32)


def main(out: Path, rounds: int, lessons: int, more: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains little from more, and on a busy machine loses much
    drift, draw, pupil = Drift(), random.Random(0), make()
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=RATE, betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM))
    began = time.monotonic()
    for number in range(rounds + 1):
        texts = drift.texts(number / max(1, rounds), LENGTH, draw)
        steps = more if number else lessons
        for step in range(1, steps + 1):
            ids = torch.tensor([next(texts) for _ in range(BATCH)])
            loss = pupil(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warm.step()
            if step == steps or (step % 50 == 0 and not number):
                what = f"round {number}/{rounds}" if number else f"lesson {step}/{lessons}"
                print(
                    f"   {what}: loss {loss.item():.3f} a letter, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
        pupil.save_pretrained(out / f"policy-{number:02}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
