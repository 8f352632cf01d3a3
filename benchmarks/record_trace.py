"""Record a trace for `bandit.py` from a real engine: what every arm gives at every place of one job.

    python benchmarks/record_trace.py OUT.jsonl[.gz] DIRECTORY [--engine vllm] [--drafter frozen]
        [--rounds 0,2,4,6,8,10] [--batches 32,16,4,1] [--waves 4] [--tokens 96] [--most 4] [--repeat 3]
        [--clock perf_counter]

DIRECTORY is where `examples/eagle_cotrain.py` was run. The job is its rounds one after the other, in one engine: a
trained policy that drifts, with its ``co-trained`` drafter, or a ``frozen`` one that is exchanged for the co-trained
one in the end. A round is a rollout at several batch sizes, the largest first, with so many waves of prompts each.

Each wave runs once per fixed arm, greedy, so that every arm generates the same tokens; `bandit_traces.py` says how the
steps are lined up. Times are medians over the repeats. What a switch costs is measured in runs that change the arm
after every other step: what their steps take beyond the mean of both arms', as medians over four steps each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quick
from recording import sglang_engine
from recording.line_up import Row, fours, line_up, middle, write

from flashpatch.patches.eagle.bandit.arm import Arm

sglang_engine.follow()  # a scheduler of SGLang's runs this file too

Part = tuple[Path, Path, Callable[[int, int], list[list[int]]]]
"""Target, drafter, and prompts by number and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--drafter", choices=("frozen", "co-trained"), default="frozen")
    parser.add_argument("--rounds", default="0,2,4,6,8,10")
    parser.add_argument("--batches", default="32,16,4,1")
    for name, value in dict(waves=4, tokens=96, most=4, repeat=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--clock", choices=("process_time", "perf_counter"), default="perf_counter")
    wanted = quick.parse(parser, rounds="0", batches="1", waves=1, tokens=16, most=2, repeat=1)
    wanted.batches = sorted(map(int, wanted.batches.split(",")), reverse=True)
    folder = Path(tempfile.mkdtemp(prefix="flashpatch-trace-"))
    try:
        record(folder, wanted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # all is said; an engine's shutdown takes seconds


def record(folder: Path, wanted: argparse.Namespace) -> None:
    """Run the job with every arm, and write the trace."""
    parts = rounds(wanted)
    engine = start(folder, parts[0], wanted)
    what = f"trained Llama that drifts, drafter {wanted.drafter}, rounds {wanted.rounds}"
    source = f"{engine.name}, {what}, {wanted.clock}"
    arms = [Arm.DISABLE, *(Arm(k, 1, k + 1) for k in range(1, wanted.most + 1))]
    low, high = arms[0], arms[-1]
    lines: list[dict[str, Any]] = []
    extra: list[float] = []
    for number, (target, drafter, prompts) in enumerate(parts):
        engine.weights(target, drafter)
        for batch in wanted.batches:
            engine.run([high], prompts(batch, 0), wanted.tokens)  # warm
            steady: dict[Arm, list[float]] = {low: [], high: []}
            changing: list[float] = []
            rates: dict[Arm, list[float]] = {arm: [] for arm in arms}
            for wave in range(wanted.waves):
                asked = prompts(batch, wave)
                runs: dict[Arm, list[list[Row]]] = {arm: [] for arm in arms}
                for _ in range(wanted.repeat):
                    for arm in arms:
                        rows, spent = engine.run([arm], asked, wanted.tokens)
                        runs[arm].append(rows)
                        if arm in steady:
                            steady[arm] += fours(spent)
                    changing += fours(engine.run([low, low, high, high], asked, wanted.tokens)[1])
                series = {arm: middle(each) for arm, each in runs.items()}
                lines += line_up(series, batch)
                for arm, rows in series.items():
                    rates[arm].append(sum(t for t, _ in rows) * batch / sum(s for _, s in rows))
            if changing and all(steady.values()):
                usual = statistics.fmean(statistics.median(each) for each in steady.values())
                extra.append(2 * (statistics.median(changing) - usual))  # one change in two steps
            shown = ", ".join(f"{arm} {statistics.fmean(each):.0f}" for arm, each in rates.items())
            print(f"part {number + 1}/{len(parts)}, batch {batch}: tokens/s {shown}", flush=True)
        switch = max(0.0, statistics.median(extra))
        write(wanted.out, source, switch, lines)  # so far
    print(f"{len(lines)} places, {len(arms)} arms, a switch costs {1e3 * switch:.3f} ms: {wanted.out}")


def start(folder: Path, part: Part, wanted: argparse.Namespace) -> Any:
    """The engine, see `recording`."""
    arguments = (*part[:2], wanted.most, wanted.batches[0], wanted.clock)
    if wanted.engine == "sglang":
        return sglang_engine.Engine(*arguments, folder)
    from flashpatch.verify.probes.eagle import tiny

    os.environ |= {**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from recording import vllm_engine

    return vllm_engine.Engine(*arguments)


def rounds(wanted: argparse.Namespace) -> list[Part]:
    """Rounds of `examples/eagle_cotrain.py`, as they were."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "eagle"))
    from language import Drift

    at, numbers = wanted.directory.resolve(), [int(number) for number in wanted.rounds.split(",")]
    last = len(list(at.glob("policy-*"))) - 1

    def part(number: int, drafter: str) -> Part:
        def prompts(count: int, wave: int) -> list[list[int]]:
            return Drift().prompts(number / last, count, 2000 + number + 100 * wave)

        return at / f"policy-{number:02}", at / drafter, prompts

    first = "drafter-start"
    if wanted.drafter == "frozen":
        parts = [part(number, first) for number in numbers]
        return [*parts, part(numbers[-1], f"drafter-{numbers[-1]:02}")]
    # The drafter of a round has learned from the rounds before.
    return [part(number, f"drafter-{number - 1:02}" if number else first) for number in numbers]


if __name__ == "__main__":
    main()
