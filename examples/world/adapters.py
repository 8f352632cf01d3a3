"""Compare jobs that train adapters: ``python adapters.py DIRECTORY``, that of ``verl_lora_cpu.sh``.

Of each job: the reward of the first step, whose samples are of the first policy, and of the last third of its steps; the number of
different adapters that the engine put in place, as it reported them; and how far, in the first step and the last third, a token's
probability in the engine was from the trainer's (verl's ``training/rollout_probs_diff_mean``).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "verl_cpu")]

from watch import MISMATCH, REWARD, read  # noqa: E402

from flashpatch.verify import read_events  # noqa: E402

COLUMNS = ("job", "steps", "reward", "different adapters", "distance")


def ends(values: list[float]) -> tuple[float, float]:
    """The first value, and the mean of the last third."""
    return values[0], statistics.mean(values[-max(1, len(values) // 3) :])


def adapters(ledger: Path, job: str) -> list[str]:
    """The digests of the adapters that the job's engine put in place, in order."""
    runs = sorted(ledger.glob(f"{job}-*"), key=lambda run: run.stat().st_mtime)
    recorded = read_events.Recorded(runs[-1]) if runs else None
    processes = map(recorded.of, sorted(recorded.files)) if recorded else ()
    found = [event for process in processes for event in process.events if event.get("role") == "lora"]
    return [event["digest"] for event in found if event["outcome"] == "committed"]


def row(directory: Path, job: str) -> dict[str, Any]:
    """The columns of one job."""
    steps = [row for row in read(directory / f"{job}.jsonl") if REWARD in row]
    if not steps:
        return {"job": job, "steps": 0}
    texts = ["{:.3f} to {:.3f}".format(*ends([row[name] for row in steps])) for name in (REWARD, MISMATCH)]
    return {
        "job": job,
        "steps": len(steps),
        "reward": texts[0],
        "different adapters": len(set(adapters(directory / "ledger", job))),
        "distance": texts[1],
    }


def main(directory: Path) -> None:
    logs = sorted(directory.glob("*_*.log"), key=lambda path: path.stat().st_mtime)
    print(f"   | {' | '.join(COLUMNS)} |")
    print(f"   |{' --- |' * len(COLUMNS)}")
    for log in logs:
        found = row(directory, log.stem)
        print(f"   | {' | '.join(str(found.get(name, '')) for name in COLUMNS)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
