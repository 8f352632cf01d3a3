"""Draw reward and rollout/trainer mismatch of several runs: ``python plot.py OUT.png RUN.jsonl...``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

from pictures import finish  # noqa: E402
from watch import MISMATCH, REWARD, read  # noqa: E402


def main(out: Path, runs: list[Path]) -> None:
    metrics = {run.stem: [row for row in read(run) if REWARD in row] for run in runs}
    jobs = {
        name: {"reward": [row[REWARD] for row in rows], "mismatch": [row[MISMATCH] for row in rows]}
        for name, rows in metrics.items()
    }
    for name, job in jobs.items():
        gained = job["reward"]
        part = max(1, len(gained) // 4)
        first, last = sum(gained[:part]) / part, sum(gained[-part:]) / part
        print(f"   {name}: reward {first:.2f} in the first quarter, {last:.2f} in the last;", end=" ")
        print(f"mismatch at most {max(job['mismatch']):.4f}")
    finish({out: {"picture": "reward and mismatch", "jobs": jobs}})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
