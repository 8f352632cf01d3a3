"""Run ``flashpatch eagle-warmup``: train a first drafter for a model, offline, on the model's own answers."""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from flashpatch.commands.report import Table, emit
from flashpatch.patches.eagle.errors import eagle_error

HELP = "train a first drafter for a model on its own answers, through vLLM, before any rollout"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="directory of the model's Hugging Face checkpoint")
    add("data", type=Path, help=".parquet or .jsonl; column prompt: texts, chat messages or token ids")
    add("--out", type=Path, required=True, metavar="DIR", help="gets drafter/ and samples/")
    add("--seconds", type=float, default=600.0, metavar="S", help="time to train (default 600)")
    add("--engine", choices=("vllm", "sglang"), default="vllm", help="whose format it gets (default vllm)")
    add("--vllm", type=json.loads, default={}, metavar="JSON", help="arguments of vllm.LLM")


def run(args: argparse.Namespace) -> int:
    """Return 0 with a drafter; what prevents one raises PatchError."""
    drafter, samples = args.out / "drafter", args.out / "samples"
    if not 0 < args.seconds < inf:
        args.usage_error("--seconds must be positive and finite")
    if drafter.exists():
        args.usage_error(f"{drafter} exists; name another --out")
    if not (args.model / "config.json").exists():
        args.usage_error(f"{args.model} has no config.json")
    captured = answer(args.model, read_prompts(args.data)[:512], samples, args.vllm)
    from flashpatch.patches.eagle.train.settings import WorkerSettings
    from flashpatch.patches.eagle.train.worker import Worker

    where, events = (str(args.model), str(samples), str(args.out / "training")), []
    settings = WorkerSettings(*where, engine=args.engine, rate=1e-3, least=min(8, captured))
    Worker(settings, events.append, queue.Queue()).train(args.seconds)
    made = next((event for event in events if event["event"] == "drafter"), None)
    if made is None:
        raise eagle_error("eagle-warmup", "no drafter was trained.", "Give more prompts, or more seconds.")
    Path(made["folder"]).rename(drafter)
    found = {"drafter": str(drafter), "samples": captured, "steps": made["step"], "loss": made["loss"]}
    emit(found, [Table("A first drafter", tuple(found), [tuple(map(str, found.values()))])], args.json)
    return 0


def read_prompts(data: Path) -> list[Any]:
    """Return the prompts of a file; raise PatchError if it has none, or one that is not as `arguments` says."""
    try:
        if data.suffix == ".jsonl":
            rows = [json.loads(line)["prompt"] for line in data.read_text().splitlines() if line.strip()]
        else:
            import pandas

            column = pandas.read_parquet(data)["prompt"]
            rows = [row if isinstance(row, str) else row.tolist() for row in column]
        for number, row in enumerate(rows):
            if not row or not (isinstance(row, str) or all(isinstance(part, (int, Mapping)) for part in row)):
                raise ValueError(f"prompt {number} is {row!r:.80}")
        if not rows:
            raise ValueError("it has no prompts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "Give a .parquet or .jsonl whose column prompt has texts, chat messages or token ids."
        problem = f"{data} cannot be read: {type(error).__name__}: {error}."
        raise eagle_error("eagle-warmup", problem, advice) from error
    return rows


def ask(llm: Any, prompts: list[Any], sampling: Any) -> None:
    """Let a `vllm.LLM` answer what `read_prompts` returned."""
    if chats := [list(map(dict, one)) for one in prompts if isinstance(one[0], Mapping)]:
        llm.chat(chats, sampling)
    if ids := [{"prompt_token_ids": list(map(int, one))} for one in prompts if isinstance(one[0], int)]:
        llm.generate(ids, sampling)
    if texts := [one for one in prompts if isinstance(one, str)]:
        llm.generate(texts, sampling)


def answer(model: Path, prompts: list[Any], samples: Path, more: Mapping[str, Any]) -> int:
    """Let vLLM answer prompts, and wait for what is captured; return how many samples."""
    import flashpatch
    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    flashpatch.enable("eagle", strict=True, samples=str(samples.absolute()), history=False, capture_budget=0)
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), **{"enable_prefix_caching": False, **more})  # a cached prompt would leave no states
    for asked, tokens in ((prompts, 512), (prompts[:1], 1)):  # a step reports what the one before ended
        ask(llm, asked, SamplingParams(temperature=1.0, max_tokens=tokens, detokenize=False))
    llm.collective_rpc("eagle_flush")
    reader, before = SampleReader(samples), -1
    while (written := len(reader.waiting())) != before:  # by a thread of the engine
        before = written
        time.sleep(1.0)
    if not written:
        raise eagle_error("eagle-warmup", "no answer was captured.", "Look at vLLM's log.")
    return written
