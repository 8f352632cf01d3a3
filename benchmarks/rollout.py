"""Tokens per second of rollouts by precision, with and without speculation, against stock vLLM in the same run.

    python benchmarks/rollout.py WORLD|350M [--engines NAME,...] [--batches 1,4,8,16,32] [--rounds 3] [--tokens 32]
        [--clock wall|cpu]
    python benchmarks/rollout.py WORLD|350M --profile int8

WORLD is a directory made by examples/world/make.py, 350M a random Qwen2 that is made on the spot, for which there is no
speculation. Engines in processes of their own take turns on the same prompts, which a round before the first has asked
already, at temperature 1, on one thread each:

    stock ...      vLLM without FlashPatch: bf16, online fp8 per channel, and int8 from a checkpoint in W8A8
    bf16 history   bf16 with the family eagle's drafts from history
    fp8, int8 ...  opened by FlashPatch from the bf16 model; "history" with drafts besides

Ratios are of tokens per second over stock bf16's, the median of the rounds and their range. An engine with less than an
eighth of stock bf16's pace is timed once, with four tokens, and not at larger batches. ``--profile`` prints where an engine
spends the time of a batch of one. On a machine that others use, ``--clock cpu`` counts the processor time of each engine's
process instead of the time that passed."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quick
from turns import Engine, cpu, middle

BASE = "stock bf16"
ENGINES = {
    BASE: (),
    "stock fp8": (),
    "stock int8": (),
    "fp8": ("fp8",),
    "int8": ("int8",),
    "int8_weight_only": ("int8_weight_only",),
    "bf16 history": ("eagle",),
    "fp8 history": ("fp8", "eagle"),
    "int8 history": ("int8", "eagle"),
}
"""Engines with the names that FlashPatch is enabled with in them."""
HOPELESS, FEW = 8, 4


def main() -> None:
    """Measure, and print a table."""
    parser = quick.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", choices=ENGINES)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = quick.parse(parser, engines=f"{BASE},int8", batches="1,2", rounds=1, tokens=8)
    if wanted.engine:
        _serve(wanted)
        return
    names = [name for name in wanted.engines.split(",") if name in ENGINES]
    if BASE not in names:
        parser.error(f"--engines: {BASE} must be among them; there are {', '.join(ENGINES)}")
    if str(wanted.model) == "350M":
        names = [name for name in names if "eagle" not in ENGINES[name]]
    with tempfile.TemporaryDirectory() as folder:
        _models(wanted.model, Path(folder), "stock int8" in names)
        sys.argv += ["--folder", folder]
        if wanted.profile:
            print(Engine(wanted.profile).answer() and "")
            return
        engines = {name: Engine(name) for name in names}
        for engine in engines.values():
            engine.answer()
        found = {int(batch): _measure(engines, int(batch), wanted) for batch in wanted.batches.split(",")}
    _print(found, names, wanted)


def _measure(
    engines: dict[str, Engine], batch: int, wanted: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Let the engines take turns with one batch size; remove those that are hopelessly slow."""
    paces: dict[str, list[float]] = {}
    for name, engine in engines.items():
        paces[name] = [engine.ask([batch, FEW])["pace"]]
    slow = {name for name, (pace,) in paces.items() if pace * HOPELESS < paces[BASE][0]}
    quick_ones = [name for name in engines if name not in slow]
    for number in range(-1, wanted.rounds):  # the first is the epoch before
        for name in quick_ones if number % 2 else quick_ones[::-1]:
            pace = engines[name].ask([batch, wanted.tokens])["pace"]
            paces[name] = [pace] if number <= 0 else [*paces[name], pace]
    found = {}
    for name, own in paces.items():
        base = paces[BASE] if name not in slow else [sorted(paces[BASE])[len(paces[BASE]) // 2]]
        found[name] = middle([pace / stock for pace, stock in zip(own, base, strict=True)])
        found[name]["pace"] = sorted(own)[len(own) // 2]
    for name in slow:
        del engines[name]
    told = ", ".join(f"{name} {one['pace']:.1f} ({one['ratio']:.2f})" for name, one in found.items())
    print(f"batch {batch}: {told}", file=sys.stderr, flush=True)
    return found


def _models(model: Path, folder: Path, int8: bool) -> None:
    """Write the checkpoints that engines are opened on into ``folder``: ``bf16``, and ``int8`` if it is wanted."""
    if str(model) == "350M":
        import random_models

        [size] = [size for size in random_models.SIZES if size.name == "350M"]
        random_models.write(size, folder / "bf16")
    else:
        (folder / "bf16").symlink_to((model / "model").resolve())
    if int8:
        _write_int8(folder / "bf16", folder / "int8")


def _write_int8(source: Path, to: Path) -> None:
    """Write a checkpoint as others publish them: W8A8, a scale per output channel, in the format of compressed-tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    from flashpatch.patches.fp8.vllm import int8_config

    to.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale
            tensor = (tensor.float() / scale).round().to(torch.int8)
        tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = int8_config.configuration()
    (to / "config.json").write_text(json.dumps(config))


def _serve(wanted: argparse.Namespace) -> None:
    """Answer the parent's questions with one engine, or profile it."""
    import flashpatch

    for name in ENGINES[wanted.engine]:
        options = dict(history=True) if name == "eagle" else {}
        flashpatch.enable(name, strict=True, **options)
    from vllm import LLM, SamplingParams

    folder = wanted.folder / ("int8" if wanted.engine == "stock int8" else "bf16")
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        quantization="fp8_per_channel" if wanted.engine == "stock fp8" else None,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=200,  # memory for all engines at a time
        skip_tokenizer_init=True,
    )
    prompts = _prompts(wanted)
    clock = time.process_time if wanted.clock == "cpu" else time.perf_counter

    def rollout(batch: int, tokens: int) -> float:
        asked = [{"prompt_token_ids": prompts[number // 4 % len(prompts)]} for number in range(batch)]
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, detokenize=False)
        began = clock()
        found = llm.generate(asked, sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found) / (clock() - began)

    rollout(1, FEW)
    if wanted.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            rollout(1, wanted.tokens)
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20), file=sys.stderr)
    print(json.dumps({"open": True}), flush=True)
    for line in () if wanted.profile else sys.stdin:
        print(json.dumps({"pace": rollout(*json.loads(line))}), flush=True)


def _prompts(wanted: argparse.Namespace) -> list[list[int]]:
    if str(wanted.model) == "350M":
        return [[(row * 977 + place * 131) % 40_000 + 3 for place in range(40)] for row in range(8)]
    import pandas
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(wanted.model / "model")
    rows = pandas.read_parquet(wanted.model / "train.parquet")["prompt"][:8]
    texts = [words.apply_chat_template(list(row), tokenize=False, add_generation_prompt=True) for row in rows]
    return [words(text, add_special_tokens=False)["input_ids"] for text in texts]


def _print(found: dict[int, dict[str, Any]], names: list[str], wanted: argparse.Namespace) -> None:
    from flashpatch.commands.report import Table, emit

    def cell(one: dict[str, float] | None) -> str:
        if one is None:
            return ""
        return f"{one['pace']:.1f}; {one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"

    rows = [(name, *(cell(row.get(name)) for row in found.values())) for name in names]
    head = ("engine", *(f"batch {batch}" for batch in found))
    second = "second of processor time" if wanted.clock == "cpu" else "second"
    title = f"Tokens per {second}; over {BASE}, {wanted.model.name}, {cpu()}"
    emit({str(batch): row for batch, row in found.items()}, [Table(title, head, rows)], wanted.json)
    if "int8" in names and not wanted.json:
        ahead = [batch for batch, row in found.items() if row["int8"]["ratio"] > 1]
        print(
            f"int8 is faster than {BASE} at batches {', '.join(map(str, ahead)) or 'of none of these sizes'}"
        )


if __name__ == "__main__":
    main()
