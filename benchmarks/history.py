"""What drafts from history gain or cost: vLLM with them against stock vLLM, on a real model's rollouts.

    python benchmarks/history.py WORLD [--batches 1,4,16,32] [--rounds 6] [--tokens 64] [--temperature 1.0]

WORLD is a directory made by examples/world/make.py. Two engines in processes of their own, stock and with history, take
turns on the same prompts; the batch shrinks as answers end. Per batch size:

    new        prompts that history has not seen: what it costs where it knows nothing but the tasks' form
    repeated   the same prompts round after round, as in a later epoch; the policy does not change

Ratios are stock's seconds per token over those with history, the median over the rounds and the interval that holds the
true median in 95 of 100 such runs (the range, for few rounds). Above 1 history is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import quick

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", type=Path)
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=("stock", "history"), help=argparse.SUPPRESS)
    wanted = quick.parse(parser, batches="1", rounds=2, tokens=8)
    if wanted.engine:
        _serve(wanted)
        return
    engines = {name: _Engine(name) for name in ("stock", "history")}
    batches = list(map(int, wanted.batches.split(",")))
    needed = sum(max(1, batch // 4) * (wanted.rounds + 2) for batch in batches)
    prompts = list(range(engines["stock"].prompts))
    if len(prompts) < needed:
        parser.error(
            f"{wanted.world} has {len(prompts)} prompts, {needed} are needed: make one with more (--train)"
        )
    random.Random(0).shuffle(prompts)
    found = {}
    for batch in batches:
        for kind in ("new", "repeated"):
            found[f"{batch} {kind}"] = _measure(engines, prompts, batch, kind, wanted.rounds)
    _print(found, wanted.json)


def _measure(
    engines: dict[str, _Engine], prompts: list[int], batch: int, kind: str, rounds: int
) -> dict[str, float]:
    """Let the engines take turns; ``prompts`` loses those that were asked."""
    ratios, totals = [], {name: [0, 0.0] for name in engines}
    before = engines["history"].ask([])
    asked = [prompts.pop() for _ in range(max(1, batch // 4))]
    for number in range(-1, rounds):  # the first round warms up, and is the epoch before
        if kind == "new" and number >= 0:
            asked = [prompts.pop() for _ in asked]
        pace = {}
        for name in sorted(engines, reverse=number % 2 == 0):
            answer = engines[name].ask((asked * 4)[:batch])
            pace[name] = answer["seconds"] / answer["tokens"]
            if number >= 0:
                totals[name][0] += answer["tokens"]
                totals[name][1] += answer["seconds"]
        if number >= 0:
            ratios.append(pace["stock"] / pace["history"])
    after = engines["history"].ask([])
    drafted, accepted, drafts = (after[key] - before[key] for key in ("drafted", "accepted", "drafts"))
    return {
        **_middle(ratios),
        "stock": totals["stock"][0] / totals["stock"][1],
        "history": totals["history"][0] / totals["history"][1],
        "drafted": drafted / totals["history"][0],
        "accepted": accepted / drafted if drafted else 0.0,
        "lookup": (after["lookup"] - before["lookup"]) / totals["history"][1],
    }


class _Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=os.environ | ENVIRONMENT
        )
        self.prompts = self._answer()["prompts"]

    def ask(self, prompts: list[int]) -> dict[str, Any]:
        """Let it answer prompts by their numbers, one answer each; return tokens, seconds, and its counts."""
        print(json.dumps(prompts), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the engine ended: exit {self._process.wait()}")


def _serve(wanted: argparse.Namespace) -> None:
    """Answer the parent's questions with one engine."""
    import pandas

    if wanted.engine == "history":
        import flashpatch

        flashpatch.enable("eagle", strict=True, history=True, capture_rate=0.0)
    from vllm import LLM, SamplingParams

    model = str(wanted.world / "model")
    llm = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=64)
    rows = pandas.read_parquet(wanted.world / "train.parquet")["prompt"]
    tokenizer = llm.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template(list(row), tokenize=False, add_generation_prompt=True) for row in rows
    ]
    ids = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    sampling = SamplingParams(temperature=wanted.temperature, max_tokens=wanted.tokens, detokenize=False)
    print(json.dumps({"prompts": len(ids)}), flush=True)
    for line in sys.stdin:
        asked = [ids[number] for number in json.loads(line)]
        began, tokens = time.perf_counter(), 0
        if asked:
            found = llm.generate(asked, sampling, use_tqdm=False)
            tokens = sum(len(one.outputs[0].token_ids) for one in found)
        answer = {"tokens": tokens, "seconds": time.perf_counter() - began}
        if wanted.engine == "history":
            from flashpatch.patches.eagle.vllm import history_drafts

            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            metrics = history_drafts.history_of(scheduler).drafts.metrics()
            answer |= {key: metrics[key] for key in ("drafts", "drafted", "accepted")}
            answer["lookup"] = metrics["seconds"]
        print(json.dumps(answer), flush=True)


def _middle(values: list[float]) -> dict[str, float]:
    values, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return {"ratio": statistics.median(values), "low": values[low], "high": values[high]}


def _print(found: dict[str, dict[str, float]], as_json: bool) -> None:
    from flashpatch.commands.report import Table, emit

    rows = [
        (
            name,
            f"{one['stock']:.0f}",
            f"{one['history']:.0f}",
            f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})",
            f"{one['drafted']:.2f}",
            f"{one['accepted']:.0%}",
            f"{one['lookup']:.1%}",
        )
        for name, one in found.items()
    ]
    head = (
        "batch, prompts",
        "stock, tokens/s",
        "history, tokens/s",
        "ratio",
        "drafted per token",
        "accepted",
        "look-up",
    )
    emit(found, [Table("Drafts from history against stock vLLM", head, rows)], as_json)


if __name__ == "__main__":
    main()
