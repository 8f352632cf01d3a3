"""What fp8, a drafter, drafts from history and streaming bring together: a simulated rollout on a named GPU.

    python benchmarks/combined.py [--gpu H100] [--model Qwen2.5-7B] [--slots 256] [--requests 512] [--longest 8192]
        [--lengths recorded] [--train 0.5] [--check FILE] [--picture FILE.png] [--json]

Nothing here runs on a GPU. A rollout of ``--requests`` answers on one replica, ``--slots`` at once, shrinks to its
tail; each decode step takes what a roofline says (`combining/roofline.py`), and with drafts it uses the number of
drafts that is best for its batch, which a bandit has to find out. Training on devices of its own takes the share
``--train`` of the plain rollout's time, in one go after it, or streamed: a batch of training starts as soon as its
tokens are there. Before that the same simulator is given step times measured on this machine (``--check``, written by
`record_steps.py`) and its rollouts are compared with measured ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import longtail
from combining import acceptance, measured
from combining.rollout import NONE, Drafting, Rollout, simulate, train_ends
from combining.roofline import GPUS, MODELS, Roofline

from flashpatch.commands.report import Table, emit

HERE = Path(__file__).parent
SHARE = 1 / 16  # of all tokens in one batch of training
TRACES = ("sglang_drift", "vllm_drift")


def ways(gained: list[float]) -> dict[str, tuple[int, list[Drafting]]]:
    """Return by name the bits of a weight and the ways to draft."""
    drafter, history = acceptance.eagle(gained), acceptance.history(*acceptance.HISTORY)
    return {
        "none": (16, [NONE]),
        "fp8": (8, [NONE]),
        "eagle": (16, drafter),
        "fp8 + eagle": (8, drafter),
        "history": (16, history),
        "fp8 + history": (8, history),
    }


def response_lengths(kind: str, count: int, longest: int) -> list[int]:
    """Return lengths of a recorded job, scaled so that its longest has ``longest`` tokens, or made-up ones."""
    if kind == "longtail":
        return [min(longest, length) for length in longtail.responses(count)]
    with gzip.open(HERE / "lengths" / "verl.jsonl.gz", "rt") as file:
        found = [json.loads(line)["tokens"] for line in file]
    return [max(1, found[at % len(found)] * longest // max(found)) for at in range(count)]


def compute(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Rollout], list[str]]:
    """Return the rows of the table, the rollouts behind them, and what they assume."""
    gained = acceptance.gains([HERE / "traces" / f"{name}.jsonl.gz" for name in TRACES])
    lengths = response_lengths(given.lengths, given.requests, given.longest)
    gpu, model = GPUS[given.gpu], MODELS[given.model]
    rollouts: dict[str, Rollout] = {}
    for name, (bits, options) in ways(gained).items():
        times = Roofline(gpu, model, bits)
        rollouts[name] = simulate(times, options, lengths, given.slots, given.prompt)
    plain = rollouts["none"].seconds
    rate = sum(lengths) / (given.train * plain)
    rows = []
    for name, rollout in rollouts.items():
        complete, streamed = train_ends(rollout, lengths, rate, SHARE)
        row = {"name": name, "rollout": rollout.seconds, "complete": complete, "streaming": streamed}
        rows.append(row)
    base = rows[0]
    for row in rows:
        row["faster"] = base["rollout"] / row["rollout"]
        row["faster_complete"] = base["complete"] / row["complete"]
        row["faster_streaming"] = base["complete"] / row["streaming"]
    roof = Roofline(gpu, model)
    said = [
        f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.flops[16] / 1e12:.0f} bf16 and "
        f"{gpu.flops[8] / 1e12:.0f} fp8 TFLOP/s ({gpu.source})",
        f"{model.name}: {model.layers} layers of {model.layer_weights / 1e6:.0f} million weights, head "
        f"{model.head_weights / 1e6:.0f} million in bf16, cache {model.kv_bytes / 1024:.0f} KiB per token in bf16",
        f"kernels reach {roof.memory:.0%} of bandwidth and {roof.arithmetic:.0%} of FLOP/s (assumed, not measured); "
        f"{1e3 * roof.step_seconds:.1f} ms per step and {1e3 * roof.pass_seconds:.1f} ms per drafter pass beside them",
        f"lengths: {given.lengths}, {len(lengths)} answers, mean {sum(lengths) / len(lengths):.0f}, longest "
        f"{max(lengths)}; prompts of {given.prompt} tokens; {given.slots} slots",
        f"eagle, tokens per step with 0, 1, 2... drafts: {', '.join(f'{value:.2f}' for value in gained)} "
        f"(traces {', '.join(TRACES)}: a tiny Llama on a CPU, most of it with a drafter that stays behind), "
        "the same in fp8; one layer, a projection and the head; the best number for each batch is known",
        "history: {:.2f} drafted per token, {:.0%} accepted (a sorting task of SmolLM2-135M, docs/eagle.md)".format(
            *acceptance.HISTORY
        ),
        f"training: devices of its own, {given.train:.0%} of the plain rollout's time; streamed in batches of "
        f"{SHARE:.0%} of the tokens; on policy; weight transfer and drafter training take no time",
    ]
    return rows, rollouts, said


def numbers(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the picture."""
    bars = {row["name"]: [row["faster"], row["faster_complete"], row["faster_streaming"]] for row in rows}
    return {"picture": "combined speed", "on": f"{given.model} on {given.gpu}, simulated", "bars": bars}


def main() -> None:
    """Print the check and the table, and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-7B")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest answer")
    parser.add_argument("--lengths", choices=("recorded", "longtail"), default="recorded")
    parser.add_argument("--train", type=float, default=0.5, help="of the plain rollout's time")
    parser.add_argument("--check", type=Path, default=HERE / "combining" / "steps_cpu.json")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    checked = measured.compare(given.check)
    rows, _, said = compute(given)
    source = json.loads(given.check.read_text())["source"]
    first = Table(
        f"check: rollouts of recorded lengths, {source}",
        ["drafts", "tokens per step", "measured", "range", "simulated", "error"],
        [
            [
                str(row["drafts"]),
                f"{row['gained']:.2f}",
                f"{row['measured']:.2f} s",
                f"{row['range'][0]:.2f} to {row['range'][1]:.2f}",
                f"{row['simulated']:.2f} s",
                f"{row['error']:+.1%}",
            ]
            for row in checked
        ],
    )
    second = Table(
        "SIMULATED, ratios to none without streaming\n  " + "\n  ".join(said),
        ["", "rollout", "times faster", "step, times faster", "step, streaming"],
        [
            [
                row["name"],
                f"{row['rollout']:.1f} s",
                *(f"x{row[key]:.2f}" for key in ("faster", "faster_complete", "faster_streaming")),
            ]
            for row in rows
        ],
    )
    emit({"check": checked, "rows": rows, "assumptions": said}, [first, second], given.json)
    if given.picture is not None:
        sys.path.insert(0, str(HERE.parent / "examples"))
        import pictures

        pictures.finish({given.picture: numbers(given, rows)})


if __name__ == "__main__":
    main()
