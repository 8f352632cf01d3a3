"""Draw reward, the trainer's idle time and the age of tokens: ``python plot_stream.py OUT.png SEPARATE STREAM``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

from pictures import finish  # noqa: E402
from watch import REWARD, read  # noqa: E402

IDLE, STEP = "timing_s/gen", "timing_s/step"
AGES = [*(f"stream/staleness/{age}" for age in range(4)), "stream/staleness/4_or_more"]


def main(out: Path, runs: list[Path]) -> None:
    rows = {run.stem: [row for row in read(run) if REWARD in row] for run in runs}
    # The first step waits for processes that start: times are from the second one on.
    jobs = {
        name: {
            "reward": [row[REWARD] for row in steps],
            "idle_s": [row[IDLE] for row in steps[1:]],
            "step_s": [row[STEP] for row in steps[1:]],
        }
        for name, steps in rows.items()
    }
    streamed = rows["stream_async"]
    ages = [sum(row.get(age, 0.0) for row in streamed) / len(streamed) for age in AGES]
    for name, job in jobs.items():
        late = job["reward"][-max(1, len(job["reward"]) // 4) :]
        print(f"   {name}: {sum(job['step_s']):.1f} s for {len(job['step_s'])} steps,", end=" ")
        print(f"trainer idle {sum(job['idle_s']):.1f} s;", end=" ")
        print(f"reward {sum(late) / len(late):.2f} in the last quarter")
    finish({out: {"picture": "streamed training", "jobs": jobs, "age_share": ages}})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
