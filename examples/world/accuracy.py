"""Measure how often a model answers the tasks right.

    python accuracy.py DIRECTORY [--tasks NAME,...] [--prompts NUMBER] [--samples NUMBER] [--max-tokens NUMBER]

DIRECTORY is one that ``make.py`` wrote, or a model's own. Samples ``--samples`` answers per prompt at temperature 1 with
vLLM and prints a Markdown table: the pass rate, the share of prompts with right and wrong answers among their samples
(whose advantages under GRPO are not all 0), and the mean lengths of prompts and answers in tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():
    os.environ.setdefault(name, value)

sys.path.insert(0, str(Path(__file__).resolve().parent))

from make import INSTALL, chosen_tasks, positive, rows  # noqa: E402
from reward import compute_score  # noqa: E402
from tasks import TASKS, Source  # noqa: E402

HEADER = (
    "| task | pass rate | mixed prompts | prompt tokens | answer tokens |\n| --- | --- | --- | --- | --- |"
)


def line(name: str, asked: list[dict], outputs: list) -> str:
    """One row of the table: a task's prompts in verl's format and vLLM's output for each."""
    scores, answers = [], []
    for row, output in zip(asked, outputs, strict=True):
        truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
        scores.append([compute_score(name, sample.text, truth, info) for sample in output.outputs])
        answers += [len(sample.token_ids) for sample in output.outputs]
    passed = fmean(score for group in scores for score in group)
    mixed = fmean(min(group) != max(group) for group in scores)
    length = max(len(output.prompt_token_ids) for output in outputs)
    return f"| {name} | {passed:.0%} | {mixed:.0%} | at most {length} | {fmean(answers):.1f} |"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tasks", type=chosen_tasks, default=list(TASKS), metavar="NAME,...")
    parser.add_argument("--prompts", type=positive, default=24)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="one prompt of each task and its first answer")
    chosen = parser.parse_args()
    model = chosen.directory / "model" if (chosen.directory / "model").is_dir() else chosen.directory
    if not (model / "config.json").exists():
        parser.error(f"{chosen.directory} holds no model: make one with make.py")
    if find_spec("reasoning_gym") is None:
        parser.error(f"reasoning-gym is not installed: {INSTALL}")
    from vllm import LLM, SamplingParams

    # The seed is the engine's: with one per request and a prompt in parts, vLLM's runner stops on a CPU.
    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=96,
        seed=chosen.seed,
    )
    sampling = SamplingParams(n=chosen.samples, temperature=1.0, max_tokens=chosen.max_tokens)
    print(HEADER, flush=True)
    for name in chosen.tasks:
        source = Source(name, chosen.seed)
        asked = rows(source, list(islice(source.entries(), chosen.prompts)))
        outputs = llm.chat([row["prompt"] for row in asked], sampling, use_tqdm=False)
        print(line(name, asked, outputs), flush=True)
        if chosen.show:
            shown = asked[0]["prompt"][-1]["content"], outputs[0].outputs[0].text
            print(f"   {shown[0]!r} -> {shown[1]!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
