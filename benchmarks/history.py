"""What drafts from history gain or cost on a real model's rollouts, against stock vLLM and its own drafts without a drafter.

    python benchmarks/history.py WORLD [--against suffix,ngram] [--batches 1,8,16] [--rounds 6] [--tokens 64]
        [--full-length] [--clock wall|cpu]

WORLD is a directory made by examples/world/make.py. Engines in processes of their own take turns on the same prompts:
stock, the family's history, and vLLM's methods that `--against` names (suffix needs arctic-inference installed). These too run
with the family on, for nothing but its correction of vLLM's CPU kernels, without which speculation samples wrong tokens
and accepts few. The batch shrinks as answers end. Per batch size:

    new        prompts that were not asked before: what it costs where only the tasks' form is known
    repeated   the same prompts round after round, as in a later epoch; the policy does not change
    moved      as repeated, but before each round every matrix moves by 1 % of its spread, the same in all engines, and
               cached prefixes are dropped: what drafts from an older policy's answers are worth

Ratios are stock's seconds per token over an engine's, the median over the rounds and the interval that holds the true
median in 95 of 100 such runs (the range, for few rounds). Above 1 the engine is faster than stock. Where answers are short
most of a token's time is its prompt's, and ratios go with how many tokens an engine happened to draw: ``--full-length`` lets
every answer go on to ``--tokens``. On a machine that others
use, ``--clock cpu`` counts the processor time of each engine's process instead of the time that passed."""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import quick
from turns import Engine, cpu, middle

ENGINES = {
    "stock": None,
    "history": None,
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
"""Engines by name, with the ``speculative_config`` that vLLM is opened with."""
COUNTS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}
"""vLLM's own counters of what was verified and accepted."""


def main() -> None:
    """Measure, and print a table."""
    parser = quick.parser(__doc__)
    parser.add_argument("world", type=Path)
    parser.add_argument("--against", default="suffix,ngram", help="methods of vLLM (default %(default)s)")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument(
        "--full-length", action="store_true", help="no answer ends before it has --tokens tokens"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    wanted = quick.parse(parser, batches="1", rounds=2, tokens=8, against="ngram")
    if wanted.engine:
        _serve(wanted)
        return
    methods = [name for name in wanted.against.split(",") if name]
    if unknown := set(methods) - set(ENGINES):
        parser.error(f"--against {', '.join(sorted(unknown))}: there are suffix and ngram")
    engines = {name: Engine(name) for name in dict.fromkeys(("stock", "history", *methods))}
    count = min(engine.answer()["prompts"] for engine in engines.values())
    batches = list(map(int, wanted.batches.split(",")))
    needed = sum(max(1, batch // 4) * (wanted.rounds + 3) for batch in batches)
    prompts = list(range(count))
    if len(prompts) < needed:
        parser.error(
            f"{wanted.world} has {len(prompts)} prompts, {needed} are needed: make one with more (--train)"
        )
    random.Random(0).shuffle(prompts)
    found = {}
    for batch in batches:
        for kind in ("new", "repeated", "moved"):
            measured = _measure(engines, prompts, batch, kind, wanted.rounds)
            found |= {f"{batch} {kind}, {name}": one for name, one in measured.items()}
            print(f"{batch} {kind}: measured", file=sys.stderr, flush=True)
    _print(found, wanted.json)


def _measure(
    engines: dict[str, Engine], prompts: list[int], batch: int, kind: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Let the engines take turns; ``prompts`` loses those that were asked."""
    paces: dict[str, list[float]] = {name: [] for name in engines}
    totals = {name: dict.fromkeys(("tokens", "seconds", *COUNTS), 0.0) for name in engines}
    asked = [prompts.pop() for _ in range(max(1, batch // 4))]
    for number in range(-1, rounds):  # the first round warms up, and is the epoch before
        if kind == "new" and number >= 0:
            asked = [prompts.pop() for _ in asked]
        for name in sorted(engines, reverse=number % 2 == 0):
            if kind == "moved" and number >= 0:
                engines[name].ask({"move": number})
            answer = engines[name].ask((asked * 4)[:batch])
            if number >= 0:
                paces[name].append(answer["seconds"] / answer["tokens"])
                for key in totals[name]:
                    totals[name][key] += answer[key]
    return {
        name: {
            **middle([stock / own for stock, own in zip(paces["stock"], paces[name], strict=True)]),
            "pace": total["tokens"] / total["seconds"],
            "drafted": total["drafted"] / total["tokens"],
            "accepted": total["accepted"] / max(1.0, total["drafted"]),
        }
        for name, total in totals.items()
    }


def _serve(wanted: argparse.Namespace) -> None:
    """Answer the parent's questions with one engine."""
    import pandas

    if wanted.engine != "stock":  # without the family vLLM's CPU kernels sample wrongly under speculation
        import flashpatch

        history = wanted.engine == "history"
        flashpatch.enable("eagle", strict=True, history=history, adapt=history)
    from vllm import LLM, SamplingParams

    settings = dict(dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=64)
    llm = LLM(
        str(wanted.world / "model"),
        speculative_config=ENGINES[wanted.engine],
        disable_log_stats=False,
        **settings,
    )
    rows = pandas.read_parquet(wanted.world / "train.parquet")["prompt"]
    tokenizer = llm.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template(list(row), tokenize=False, add_generation_prompt=True) for row in rows
    ]
    ids = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    sampling = SamplingParams(
        temperature=wanted.temperature,
        max_tokens=wanted.tokens,
        ignore_eos=wanted.full_length,
        detokenize=False,
    )
    clock = time.process_time if wanted.clock == "cpu" else time.perf_counter
    print(json.dumps({"prompts": len(ids)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, dict):
            llm.apply_model(functools.partial(_move, asked["move"]))
            llm.reset_prefix_cache()
            print(json.dumps({}), flush=True)
            continue
        before = _counts(llm)
        began = clock()
        found = llm.generate([ids[number] for number in asked], sampling, use_tqdm=False)
        seconds = clock() - began
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        counts = {key: count - before[key] for key, count in _counts(llm).items()}
        print(json.dumps({"tokens": tokens, "seconds": seconds, **counts}), flush=True)


def _move(seed: int, model: Any) -> None:
    """Add noise of 1 % of its spread to each matrix."""
    import torch

    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=source) * parameter.float().std() * 0.01
            parameter.data.add_(noise.to(parameter.dtype))


def _counts(llm: Any) -> dict[str, float]:
    """Return what vLLM counted of its speculation so far."""
    found = {one.name: one.value for one in llm.get_metrics() if one.name in COUNTS.values()}
    return {key: float(found.get(name, 0)) for key, name in COUNTS.items()}


def _print(found: dict[str, dict[str, float]], as_json: bool) -> None:
    from flashpatch.commands.report import Table, emit

    rows = [
        (
            name,
            f"{one['pace']:.0f}",
            f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})",
            f"{one['drafted']:.2f}",
            f"{one['accepted']:.0%}",
        )
        for name, one in found.items()
    ]
    head = ("batch, prompts, engine", "tokens/s", "over stock", "drafted per token", "accepted")
    emit(found, [Table(f"Drafts without a drafter against stock vLLM, {cpu()}", head, rows)], as_json)


if __name__ == "__main__":
    main()
