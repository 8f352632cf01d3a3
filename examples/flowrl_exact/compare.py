"""Compare FlowRL with GRPO and REINFORCE where the distribution that FlowRL aims at is known.

    python examples/flowrl_exact/compare.py [--quick] [--out DIRECTORY]

prints a table per world and writes ``results.json``, ``flowrl_exact.json``, the numbers of its picture, and, where
matplotlib is installed, ``flowrl_exact.png``.
It needs torch and flashpatch, no verl and no accelerator. ``--quick`` takes fewer steps, seeds and rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import experiments
import plot
import report
import torch
from measures import effective_number
from methods import Method
from policies import Table, Tree
from small_model import Learner, Transformer, taught, world_of
from training import MEASURES, train
from worlds import expressions, strings

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from pictures import finish  # noqa: E402

DEFAULT = Path("flowrl_exact")


@dataclass(frozen=True)
class Job:
    """One method in one part of the comparison.

    Attributes:
        seeds: how many; a table's are trained as one tensor, a transformer's one after another.
    """

    part: str
    method: Method
    steps: int
    seeds: int


def jobs(quick: bool) -> list[Job]:
    """All runs."""
    steps, seeds = 60 if quick else 300, 8
    rows = experiments.comparison()
    if quick:
        rows = [row for row in rows if row.rate == max(experiments.RATES)]
    found = [Job("comparison", row, steps, seeds) for row in rows]
    found += [Job("terms", row, steps, seeds) for row in experiments.terms()]
    found += [Job("strings", row, steps, seeds) for row in experiments.lengths()]
    return found + [Job("transformer", row, 2 * steps // 3, 3) for row in experiments.network()]


_model = Transformer()
"""In each process of the pool, the taught model that all transformers start from."""


def _start(weights: dict[str, torch.Tensor]) -> None:
    torch.set_num_threads(1)
    _model.load_state_dict(weights)


def run(job: Job) -> dict[str, Any]:
    """Run one job; return its curves, ``measure: [seed][point]``, as plain numbers."""
    if job.part == "transformer":
        world = world_of(_model)
        runs = [train(world, Learner(_model, seed), job.method, job.steps, seed) for seed in range(job.seeds)]
    else:
        world = strings() if job.part == "strings" else expressions()
        kind = Tree if job.part == "strings" else Table
        runs = [train(world, kind(world, job.seeds), job.method, job.steps)]
    curves = {name: torch.cat([done.curve(name) for done in runs], 1).T.tolist() for name in MEASURES}
    goal = job.method.target(world)
    return {
        "part": job.part,
        "method": asdict(job.method),
        "steps": runs[0].steps,
        "curves": curves,
        "target": {
            "reward": float((goal * world.reward).sum(-1).mean()),
            "effective": float(effective_number(goal, world.right)),
        },
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="fewer steps, seeds and rows: under two minutes")
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="DIRECTORY")
    chosen = parser.parse_args()
    wanted, started = jobs(chosen.quick), time.monotonic()
    processes = min(2, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    torch.set_num_threads(1)
    weights = taught().state_dict()
    with concurrent.futures.ProcessPoolExecutor(processes, spawn, _start, (weights,)) as pool:
        results = []
        for done in pool.map(run, wanted):
            results.append(done)
            print(f"\r{len(results)} of {len(wanted)} runs", end="", file=sys.stderr, flush=True)
    print(f", {time.monotonic() - started:.0f} s", file=sys.stderr)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "results.json").write_text(json.dumps(results))
    print(report.tables(results))
    finish({chosen.out / "flowrl_exact.png": plot.numbers(results)})


if __name__ == "__main__":
    main()
