"""Run ``flashpatch eagle-warmup``: train a first drafter for a model, offline, on the model's own answers."""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.errors import eagle_error
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings

HELP = "train a first drafter for a model on its own answers, through vLLM, before any rollout"

_SAMPLES = "samples"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="directory of the model's Hugging Face checkpoint")
    parser.add_argument(
        "data", type=Path, help=".parquet, or .jsonl: prompts as texts, chat messages or token ids"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets drafter/ and samples/")
    parser.add_argument(
        "--key", default="prompt", metavar="NAME", help="column of the prompts (default prompt)"
    )
    parser.add_argument(
        "--prompts", type=int, default=512, metavar="N", help="most prompts to answer (default 512)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="most tokens per answer (default 512)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="time to train, after the answers (default 600)",
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "sglang"),
        default="vllm",
        help="whose format the drafter gets (default vllm)",
    )
    parser.add_argument("--rate", type=float, default=1e-3, metavar="R", help="learning rate (default 1e-3)")
    parser.add_argument(
        "--vllm",
        type=json.loads,
        default={},
        metavar="JSON",
        help='arguments of vllm.LLM, as {"max_model_len": 4096}',
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 with a drafter; what prevents one raises PatchError."""
    from flashpatch.commands.report import Table, emit
    from flashpatch.patches.eagle.train.settings import WorkerSettings

    if min(args.prompts, args.tokens, args.seconds, args.rate) <= 0:
        args.usage_error("--prompts, --tokens, --seconds and --rate must be positive")
    drafter = args.out / "drafter"
    if drafter.exists():
        args.usage_error(f"{drafter} exists; name another --out")
    if not (args.model / "config.json").exists():
        args.usage_error(f"{args.model} has no config.json")
    prompts = read_prompts(args.data, args.key)[: args.prompts]
    began = time.monotonic()
    training = args.out / "training"
    captured = answer(args.model, prompts, args.out / _SAMPLES, training, args.tokens, args.vllm)
    answered = time.monotonic()
    settings = WorkerSettings(
        target=str(args.model),
        queue=str(args.out / _SAMPLES),
        folder=str(training),
        engine=args.engine,
        rate=args.rate,
        prompts=True,
        keep="reservoir",
        versions=0,
        least=min(8, captured),
    )
    folder, figures = train_for(settings, args.seconds, lambda event: None)
    shutil.copytree(folder, drafter)
    found = {
        "drafter": str(drafter),
        "samples": captured,
        "answering_seconds": round(answered - began, 1),
        "training_seconds": round(time.monotonic() - answered, 1),
        "steps": figures.get("step", 0),
        "loss": figures.get("loss"),
    }
    rows = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    emit(found, [Table("A first drafter", ("what", "value"), rows)], args.json)
    return 0


def read_prompts(data: Path, key: str) -> list[Any]:
    """Return the prompts of a file: texts, lists of chat messages, or lists of token ids.

    Raises:
        PatchError: there is no such file or column, or a prompt is none of these.
    """
    try:
        if data.suffix == ".jsonl":
            rows = [json.loads(line)[key] for line in data.read_text().splitlines() if line.strip()]
        else:
            import pandas

            column = pandas.read_parquet(data)[key]
            rows = [row if isinstance(row, str) else list(row) for row in column]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refusal(f"{data} cannot be read: {type(error).__name__}: {error}", key) from error
    if not rows:
        raise _refusal(f"{data} has no prompts", key)
    for number, row in enumerate(rows):
        if not row or not (isinstance(row, str) or all(isinstance(part, (int, Mapping)) for part in row)):
            raise _refusal(f"{data}, prompt {number}, is {row!r:.80}", key)
    return rows


def answer(
    model: Path, prompts: list[Any], queue: Path, training: Path, tokens: int, arguments: Mapping[str, Any]
) -> int:
    """Let vLLM answer prompts while the family captures; return the number of samples.

    The queue ``queue`` is bounded, so samples move on to the folder ``training``, where a trainer looks for them first.
    """
    import flashpatch
    from flashpatch.patches.eagle.capture.sample_queue import SampleReader
    from flashpatch.patches.eagle.train.kept_samples import FOLDER, KeptSamples

    flashpatch.enable("eagle", strict=True, samples=str(queue.absolute()), history=False, capture_budget=0)
    from vllm import LLM, SamplingParams

    # a prompt from the cache would leave no states
    llm = LLM(str(model), **{"enable_prefix_caching": False, **arguments})
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, detokenize=False)
    reader = SampleReader(queue, KeptSamples(training / FOLDER, str(queue)).move)
    done = threading.Event()

    def empty() -> None:
        while not done.is_set():
            if not reader.read_samples(16):
                done.wait(0.1)

    mover = threading.Thread(target=empty, name="flashpatch-samples", daemon=True)
    mover.start()
    llm.generate([_input(llm, prompt) for prompt in prompts], sampling)
    # the last requests are reported with the first step of the next
    llm.generate([_input(llm, prompts[0])], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    llm.collective_rpc("eagle_flush")
    deadline = time.monotonic() + 60.0
    while reader.counts["read"] < len(prompts) and time.monotonic() < deadline:
        time.sleep(0.1)
    done.set()
    mover.join()
    del llm
    if not reader.counts["read"]:
        raise eagle_error("eagle-warmup", "no answer was captured.", "Look at vLLM's log.")
    return reader.counts["read"]


def _input(llm: Any, prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return {"prompt_token_ids": [int(token) for token in prompt]}
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        [dict(turn) for turn in prompt], tokenize=False, add_generation_prompt=True
    )
    return {"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}


def _refusal(problem: str, key: str) -> PatchError:
    return eagle_error(
        "eagle-warmup",
        f"{problem}.",
        f"Give a .parquet or .jsonl whose column {key!r} holds texts, chat messages or token ids; see --key.",
    )


_POLL_SECONDS = 0.2


def train_for(
    settings: WorkerSettings, seconds: float, report: Callable[[Mapping[str, Any]], None]
) -> tuple[Path, dict[str, Any]]:
    """Train for ``seconds`` in a process of its own; return the drafter's folder and the last step's figures.

    Args:
        report: called with every event of the worker.

    Raises:
        PatchError: the worker died for good, or wrote no drafter.
    """
    coordinator = Coordinator(settings)
    try:
        began: float | None = None
        ended = False
        while coordinator.state != "given up" and not ended:
            if coordinator.state == "training":
                began = began or time.monotonic()
            elif coordinator.state == "down":  # at first, and after a death: from its last checkpoint
                gone = time.monotonic() - began if began else 0.0
                coordinator.train(max(1.0, seconds - gone))
            for event in coordinator.poll():  # one call may see the start and the end of a slice
                report(event)
                ended = ended or coordinator.ends_slice(event)
            if not ended:
                time.sleep(_POLL_SECONDS)
        if coordinator.state == "given up" or coordinator.drafter is None:
            raise eagle_error(
                "drafter training",
                f"no drafter was trained: {coordinator.problem or 'too few samples'}.",
                "Give more prompts, or more seconds.",
            )
        return coordinator.drafter, coordinator.figures
    finally:
        coordinator.close()
