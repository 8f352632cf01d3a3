"""Show the progress of training jobs from verl's own logs: ``python watch.py STEPS PID=LOG.jsonl...``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

REWARD = "critic/score/mean"
MISMATCH = "training/rollout_probs_diff_mean"


def read(path: Path) -> list[dict[str, float]]:
    """One dictionary of metrics per step, those that are whole lines by now."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]


def running(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def progress(path: Path, steps: int) -> str:
    """How far one job is, and its reward of late."""
    rewards = [row[REWARD] for row in read(path) if REWARD in row]
    late = rewards[-8:]
    said = f"reward {sum(late) / len(late):.2f}" if late else "starting"
    return f"{path.stem} step {len(rewards)}/{steps}, {said}"


def main(steps: int, jobs: dict[int, Path]) -> None:
    started, shown = time.monotonic(), ""
    while True:
        ended = not any(running(pid) for pid in jobs)
        said = "; ".join(progress(path, steps) for path in jobs.values())
        now = time.monotonic() - started
        # One line that is written over on a terminal; a line per step in a log.
        if os.isatty(1):
            print(f"   {now:.0f} s: {said}", end="\n" if ended else "\r", flush=True)
        elif said != shown:
            print(f"   {now:.0f} s: {said}", flush=True)
            shown = said
        if ended:
            return
        time.sleep(2)


if __name__ == "__main__":
    pairs = (argument.partition("=") for argument in sys.argv[2:])
    main(int(sys.argv[1]), {int(pid): Path(path) for pid, _, path in pairs})
