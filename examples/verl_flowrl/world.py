"""A task with many right answers: write a sum, difference or product of two digits that gives a number.

    python world.py DIRECTORY [--lessons STEPS] [--right SHARE]

writes ``model/``, ``train.parquet`` and ``test.parquet`` as ``examples/verl_cpu/make.py`` does, whose tokenizer
and model it uses. The model is first taught right expressions, each as likely as any other, until a given share
of its answers is right: what both runs start from knows all modes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "verl_cpu"))

import make as sums  # noqa: E402
from expressions import RIGHT  # noqa: E402

TARGETS = tuple(range(2, 10))


def question(target: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{target}="}]


def answer(target: int, right: float, draw: random.Random) -> str:
    """An expression, right with probability ``right``."""
    if draw.random() < right:
        return draw.choice(RIGHT[target])
    return f"{draw.randint(0, 9)}{draw.choice('+-*')}{draw.randint(0, 9)}"


def teach(pupil, words, lessons: int, right: float, draw: random.Random) -> None:
    """Show the model ``lessons`` batches of 128 answers."""
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=2e-3)
    started = time.monotonic()
    for lesson in range(1, lessons + 1):
        targets = [draw.choice(TARGETS) for _ in range(128)]
        prompts = [
            words.apply_chat_template(question(target), tokenize=False, add_generation_prompt=True)
            for target in targets
        ]
        texts = [f"{p}{answer(t, right, draw)}<|end|>" for p, t in zip(prompts, targets, strict=True)]
        batch = words(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for row, prompt in zip(labels, prompts, strict=True):
            row[: len(words(prompt).input_ids)] = -100
        loss = pupil(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if lesson % 100 == 0 or lesson == lessons:
            print(
                f"   lesson {lesson}/{lessons}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def rows(number: int, draw: random.Random) -> pandas.DataFrame:
    """``number`` questions in verl's format, all targets equally often."""
    targets = [TARGETS[at % len(TARGETS)] for at in range(number)]
    draw.shuffle(targets)
    return pandas.DataFrame(
        {
            "data_source": "expressions",
            "prompt": question(target),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(target)},
            "extra_info": {"index": at},
        }
        for at, target in enumerate(targets)
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lessons", type=int, default=120)
    parser.add_argument("--right", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    draw = random.Random(chosen.seed)
    words = sums.tokenizer()
    pupil = sums.model(len(words))
    teach(pupil, words, chosen.lessons, chosen.right, draw)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    pupil.save_pretrained(chosen.directory / "model")
    words.save_pretrained(chosen.directory / "model")
    rows(512, draw).to_parquet(chosen.directory / "train.parquet")
    rows(64, draw).to_parquet(chosen.directory / "test.parquet")


if __name__ == "__main__":
    main()
