"""Show a training job's progress from verl's own log: ``python watch.py PID LOG.jsonl STEPS``."""

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


def main(pid: int, path: Path, steps: int) -> None:
    started, shown = time.monotonic(), -1
    while True:
        ended = not running(pid)
        rows = [row for row in read(path) if REWARD in row]
        if len(rows) != shown:
            shown = len(rows)
            last = rows[-8:]
            reward = f", reward {sum(row[REWARD] for row in last) / len(last):.2f}" if last else ", starting"
            said = f"   step {shown}/{steps}{reward}, {time.monotonic() - started:.0f} s"
            end = "\r" if os.isatty(1) else "\n"
            if end == "\r" or shown % 10 == 0 or ended:
                print(said, end=end, flush=True)
        if ended:
            print()
            return
        time.sleep(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
