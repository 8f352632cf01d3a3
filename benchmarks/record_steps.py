"""Measure step times and whole rollouts on this machine, to check the simulator of `combined.py`.

    python benchmarks/record_steps.py OUT.json [--batches 1,2,4,8,16,32] [--drafts 0,2,4] [--requests 64]
        [--rounds 3] [--clock process_time]

A tiny random Llama and an EAGLE drafter for it, made less exact by noise, answer in vLLM in this process with one
thread. For each number of drafts and each batch size the time from the end of a step to the end of the next is taken
(median), with the tokens that a request gained. A rollout asks for lengths of a recorded job (`lengths/verl.jsonl.gz`),
with at most as many requests at once as the largest batch. The clock counts the processor seconds of this process,
all threads, since wall time on a busy machine is that of its other work; rollouts have both.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENS, PROMPT = 48, 8
LENGTHS = Path(__file__).parent / "lengths" / "verl.jsonl.gz"


def main() -> None:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--drafts", default="0,2,4")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.02, help="of the drafter's weights")
    parser.add_argument("--clock", choices=("process_time", "perf_counter"), default="process_time")
    given = parser.parse_args()
    given.batches = [int(size) for size in given.batches.split(",")]
    given.drafts = [int(count) for count in given.drafts.split(",")]
    with tempfile.TemporaryDirectory(prefix="flashpatch-steps-") as folder:
        for measured in measure(Path(folder), given):
            given.out.write_text(json.dumps(measured) + "\n")  # so far
    print(given.out)
    sys.stdout.flush()
    os._exit(0)  # an engine's shutdown takes seconds


def measure(folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield after each round seconds per step, tokens per step, seconds per prompt and the times of rollouts, all as medians."""
    from flashpatch.verify.probes.eagle import tiny

    os.environ |= {**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from recording.vllm_engine import Engine, Fixed

    from flashpatch.patches.eagle.bandit.arm import Arm

    target = tiny.target(folder / "target", adds=0.0)
    drafter = tiny.noisy(folder / "drafter", tiny.drafter(folder / "exact"), given.noise)
    most, top = max(given.drafts), max(given.batches)
    engine = Engine(target, drafter, most, top, given.clock)
    controller, clock = engine._controller, getattr(time, given.clock)
    ends: list[tuple[float, int, int]] = []
    controller.listeners.append(lambda batch, arm, tokens, seconds: ends.append((clock(), batch, tokens)))

    def answer(drafts: int, prompts: list[list[int]], lengths: list[int]) -> tuple[float, float]:
        from vllm import SamplingParams

        controller.policy = Fixed([Arm(drafts, 1, drafts + 1) if drafts else Arm.DISABLE])
        ends.clear()
        asked = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        began, wall = clock(), time.perf_counter()
        engine.llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
        return clock() - began, time.perf_counter() - wall

    def prompts(count: int, seed: int) -> list[list[int]]:
        return [
            [1 + (seed + 7 * row + at) % (tiny.VOCAB - 1) for at in range(PROMPT)] for row in range(count)
        ]

    lengths = recorded_lengths(given.requests)
    steps: dict[tuple[int, int], list[tuple[float, float]]] = {}
    rollouts: dict[int, list[tuple[float, float]]] = {}
    first: list[float] = []
    answer(most, prompts(top, 0), [TOKENS] * top)  # warm
    for turn in range(given.rounds):
        first.append(answer(0, prompts(top, turn), [1] * top)[0] / top)
        for drafts in given.drafts:
            for batch in given.batches:
                answer(drafts, prompts(batch, turn), [TOKENS] * batch)
                pairs = zip(ends, ends[1:], strict=False)
                full = [(b[0] - a[0], b[2] / batch) for a, b in pairs if a[1] == b[1] == batch]
                steps.setdefault((drafts, batch), []).extend(full)
            rollouts.setdefault(drafts, []).append(answer(drafts, prompts(given.requests, turn), lengths))
            print(f"round {turn + 1}, {drafts} drafts: rollout {rollouts[drafts][-1][0]:.2f} s", flush=True)
        source = f"{engine.name}, tiny Llama of 2 layers, one thread, {given.clock}, {turn + 1} rounds"
        yield summary(source, steps, first, rollouts) | {"slots": top, "lengths": lengths}


def summary(
    source: str,
    steps: dict[tuple[int, int], list[tuple[float, float]]],
    first: list[float],
    rollouts: dict[int, list[tuple[float, float]]],
) -> dict[str, Any]:
    """Return medians of times and means of tokens."""
    return {
        "source": source,
        "steps": [
            {
                "drafts": drafts,
                "batch": batch,
                "seconds": statistics.median(seconds for seconds, _ in rows),
                "tokens": statistics.fmean(tokens for _, tokens in rows),
                "steps": len(rows),
            }
            for (drafts, batch), rows in steps.items()
            if rows
        ],
        "prompt_seconds": statistics.median(first),
        "rollouts": [
            {
                "drafts": drafts,
                "seconds": statistics.median(seconds for seconds, _ in each),
                "range": [min(each)[0], max(each)[0]],
                "wall": statistics.median(wall for _, wall in each),
            }
            for drafts, each in rollouts.items()
        ],
    }


def recorded_lengths(count: int) -> list[int]:
    """Return the first ``count`` response lengths of the recorded job."""
    with gzip.open(LENGTHS, "rt") as file:
        return [json.loads(line)["tokens"] for line in file][:count]


if __name__ == "__main__":
    main()
