"""Draw what runs found: ``python plot.py OUT.png STEPS NAME=ROLLOUT_DIRECTORY...``.

Reads what verl writes with ``trainer.rollout_data_dir``: a file per step, a line per answer. Draws three
curves per run, each over a window of steps: the reward; how many different right answers there were; and
their effective number per question, ``exp`` of their entropy, which rare ones hardly raise.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

from expressions import RIGHT, TARGETS, plain  # noqa: E402
from pictures import finish  # noqa: E402

WINDOW = 10  # steps
TOTAL = sum(len(RIGHT[target]) for target in TARGETS)

Answers = dict[str, list[tuple[str, bool]]]


def read(folder: Path, steps: int) -> list[Answers]:
    """Per step, the answers by target, each with whether it is right."""
    found = []
    for step in range(1, steps + 1):
        file = folder / f"{step}.jsonl"
        if not file.exists():
            break
        answers: Answers = defaultdict(list)
        for line in file.read_text().splitlines():
            row = json.loads(line)
            answers[str(row["gts"])].append((plain(row["output"]), row["score"] > 0.5))
        found.append(answers)
    return found


def reward(answers: Answers) -> float:
    """The share of right answers."""
    all_of_them = [right for given in answers.values() for _, right in given]
    return sum(all_of_them) / len(all_of_them)


def effective(window: list[Answers]) -> float:
    """The effective number of right answers per target, ``exp`` of the entropy of those given, averaged."""
    numbers = []
    for target in map(str, TARGETS):
        counts = Counter(text for answers in window for text, right in answers.get(target, ()) if right)
        whole = sum(counts.values())
        if whole:
            numbers.append(math.exp(-sum(n / whole * math.log(n / whole) for n in counts.values())))
    return sum(numbers) / len(numbers) if numbers else 0.0


def distinct(window: list[Answers]) -> int:
    """How many different right answers there are in a window, over all targets."""
    found = {
        (target, text)
        for answers in window
        for target, given in answers.items()
        for text, right in given
        if right
    }
    return len(found)


def windows(steps: list[Answers]) -> list[list[Answers]]:
    """The last few steps at each step; none before there are enough, so that all have the same samples."""
    return [steps[at - WINDOW : at] for at in range(WINDOW, len(steps) + 1)]


def main(out: Path, steps: int, runs: dict[str, Path]) -> None:
    seen = {name: windows(read(folder, steps)) for name, folder in runs.items()}
    if not all(seen.values()):
        raise SystemExit(f"needs {WINDOW} steps of every run")
    jobs = {
        name: {
            "reward": [sum(map(reward, window)) / len(window) for window in all_],
            "different": [distinct(window) for window in all_],
            "effective": [effective(window) for window in all_],
        }
        for name, all_ in seen.items()
    }
    for name, job in jobs.items():
        rewards, different, effectives = job.values()
        print(
            f"   {name}: reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last; "
            f"different right answers {different[0]}, then {different[-1]} of {TOTAL}; "
            f"effective number per question {effectives[0]:.1f}, then {effectives[-1]:.1f}"
        )
    finish({out: {"picture": "right answers", "window": WINDOW, "total": TOTAL, "jobs": jobs}})


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[3:])
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: Path(folder) for name, folder in given.items()})
