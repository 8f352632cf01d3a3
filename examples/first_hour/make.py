"""A tiny model, and questions in the format of verl's ``examples/data_preprocess/gsm8k.py``.

    python make.py DIRECTORY [--lessons STEPS]

writes ``model/`` (Qwen2, Hugging Face format), ``train.parquet`` and ``test.parquet``. The source of a question is
``openai/gsm8k``, so verl scores answers by its own rule for GSM8K: the number after ``####``. In its lessons the model learns to
end an answer so; which number is right, it mostly does not know. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "verl_cpu"))
import make as sums

ASKED = 'Let\'s think step by step and output the final answer after "####".'
"""What verl's script adds to each question."""
LARGEST = 3


def problem(draw: random.Random, largest: int) -> tuple[str, str]:
    """Return a question, and the answer that verl's rule takes for right."""
    question, answer = sums.problem(draw, largest)
    return f"{question} {ASKED}", f"#### {answer}"


def rows(number: int, draw: random.Random, split: str) -> pandas.DataFrame:
    """Return ``number`` questions in the columns that verl's script writes."""
    problems = [problem(draw, LARGEST) for _ in range(number)]
    return pandas.DataFrame(
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer.removeprefix("#### ")},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }
        for index, (question, answer) in enumerate(problems)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lessons", type=int, default=60, metavar="STEPS")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    words = sums.tokenizer()
    pupil = sums.model(len(words))
    sums.supervise(pupil, words, problem, chosen.lessons, draw, LARGEST, stop_at=0.5)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    pupil.save_pretrained(chosen.directory / "model")
    words.save_pretrained(chosen.directory / "model")
    for split, number in ("train", 64), ("test", 16):
        rows(number, draw, split).to_parquet(chosen.directory / f"{split}.parquet")


if __name__ == "__main__":
    main()
