"""A task with many right answers: write a sum, difference or product of two digits that gives a number.

    python world.py DIRECTORY [--lessons NUMBER] [--enough SHARE]

writes ``model/``, ``train.parquet`` and ``test.parquet`` as ``examples/verl_cpu/make.py`` does, whose
tokenizer and model it uses. The model is first taught right expressions, each as likely as any other, until
``SHARE`` of its answers are right: what both runs start from knows all modes. Nothing is downloaded.
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
from expressions import RIGHT, TARGETS, plain, value  # noqa: E402


def question(target: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{target}="}]


def teach(pupil, words, lessons: int, enough: float, draw: random.Random) -> None:
    """Show the model batches of 64 right answers until ``enough`` of its own are, or ``lessons`` times."""
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=3e-3)
    started = time.monotonic()
    for lesson in range(1, lessons + 1):
        targets = [draw.choice(TARGETS) for _ in range(64)]
        prompts = [asked(words, target) for target in targets]
        texts = [f"{p}{draw.choice(RIGHT[t])}<|end|>" for p, t in zip(prompts, targets, strict=True)]
        batch = words(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for row, prompt in zip(labels, prompts, strict=True):
            row[: len(words(prompt).input_ids)] = -100
        pupil(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if lesson % 25 == 0:
            share = right(pupil, words)
            seconds = time.monotonic() - started
            print(f"   lesson {lesson}: {share:.2f} of its answers are right, {seconds:.0f} s", flush=True)
            if share >= enough:
                return


def asked(words, target: int) -> str:
    """The text of a question, ready to be answered."""
    return words.apply_chat_template(question(target), tokenize=False, add_generation_prompt=True)


def right(pupil, words, samples: int = 64) -> float:
    """The share of right ones among so many sampled answers to each target."""
    targets = [target for target in TARGETS for _ in range(samples)]
    ids = torch.tensor(words([asked(words, target) for target in targets]).input_ids)
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(4):
            chances = pupil(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    answers = words.batch_decode(ids[:, start:])
    good = (a.endswith("<|end|>") and value(plain(a)) == t for a, t in zip(answers, targets, strict=True))
    return sum(good) / len(targets)


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
    parser.add_argument("--lessons", type=int, default=1000, help="at most")
    parser.add_argument("--enough", type=float, default=0.35, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    draw = random.Random(chosen.seed)
    words = sums.tokenizer()
    pupil = sums.model(len(words))
    teach(pupil, words, chosen.lessons, chosen.enough, draw)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    pupil.save_pretrained(chosen.directory / "model")
    words.save_pretrained(chosen.directory / "model")
    rows(512, draw).to_parquet(chosen.directory / "train.parquet")
    rows(64, draw).to_parquet(chosen.directory / "test.parquet")


if __name__ == "__main__":
    main()
