"""Compare FlowRL with GRPO and REINFORCE on a language model of 135 million weights, on a task with many right answers.

    python examples/flowrl_model/compare.py [--quick] [--out DIRECTORY]

teaches SmolLM2-135M to write expressions of three digits that give a number, until a third and more of its answers are right,
trains it by each method at three learning rates, then at the rate with the highest reward from two more seeds, and prints
how many answers to numbers that training never asked for are right, and how many different right ones there are. All methods get
the same number of samples. DIRECTORY (default ./flowrl_model) keeps each run, so that a stopped comparison goes on where it
was; numbers and picture are written to it. It needs torch, matplotlib and the packages of examples/world/requirements.txt, no verl and no
accelerator. ``--quick``: a few steps at one rate from one seed, minutes on two cores; the whole takes hours.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(EXAMPLES), str(EXAMPLES / "flowrl_exact"), str(EXAMPLES / "world")]

import smollm  # noqa: E402
import summary  # noqa: E402
import torch  # noqa: E402
import trainer  # noqa: E402
from methods import Method  # noqa: E402
from pictures import finish  # noqa: E402

RATES = (1e-5, 2e-5, 4e-5)
ENOUGH = 0.35  # right answers before reinforcement learning
SEEDS = 3
STEPS = 60

METHODS = (
    Method("GRPO", kind="grpo"),
    Method("FlowRL as shipped", beta=15.0),
    Method("FlowRL, raw, group, beta 1", beta=1.0, reward="raw", log_z="group"),
    # The coefficient whose optimum is the row's above: one over beta times six tokens.
    Method("REINFORCE, KL 1/6", kind="reinforce", beta=6.0),
)


def run(out: Path, method: Method, seed: int, steps: int) -> dict[str, Any]:
    """Train once, or read what an earlier call wrote."""
    file = out / "runs" / f"{method.name}, {method.rate:g}, {steps} steps, seed {seed}.json".replace("/", ":")
    if not file.exists():
        torch.set_num_threads(1)
        found = trainer.train(out / "taught", method, seed, steps, every=max(1, steps // 6))
        file.parent.mkdir(exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"method": asdict(method), "seed": seed, "steps": steps, **found}))
        unfinished.rename(file)
    return json.loads(file.read_text())


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="a few steps, one rate, one seed")
    parser.add_argument("--out", type=Path, default=Path("flowrl_model"), metavar="DIRECTORY")
    parser.add_argument(
        "--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side"
    )
    chosen = parser.parse_args()
    out, steps = chosen.out, 12 if chosen.quick else STEPS
    rates, seeds = (RATES[-1:], 1) if chosen.quick else (RATES, SEEDS)
    spawn = multiprocessing.get_context("spawn")
    if not (out / "taught").exists():
        print("== teaching the model the task", flush=True)
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:  # whose gigabytes end with it
            pool.submit(trainer.teach, smollm.checkpoint(), out / "taught", ENOUGH).result()
    with concurrent.futures.ProcessPoolExecutor(chosen.processes, spawn) as pool:

        def all_of(methods: list[Method], seeds: range) -> list[dict[str, Any]]:
            work = [pool.submit(run, out, method, seed, steps) for seed in seeds for method in methods]
            for at, done in enumerate(concurrent.futures.as_completed(work), 1):
                print(f"{at} of {len(work)}: {summary.line(done.result())}", flush=True)
            return [done.result() for done in work]

        print("== learning rates", flush=True)
        tried = all_of([replace(method, rate=rate) for rate in rates for method in METHODS], range(1))
        best = summary.best_rates(tried)
        print("== seeds", flush=True)
        results = best + all_of([Method(**done["method"]) for done in best], range(1, seeds))
    print(summary.tables(tried, results))
    finish({out / "flowrl_model.png": summary.numbers(results)})


if __name__ == "__main__":
    main()
