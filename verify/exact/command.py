"""Run ``flashpatch-verify exact MODEL``: exit 0 if engine and trainer agree to rounding, 1 if not, 2 on wrong use."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashpatch.commands.report import Table, emit

if TYPE_CHECKING:
    import torch

AGREE, DIFFER, USAGE = 0, 1, 2
TEXT = (
    "A trainer and an engine that hold the same weights should give the same probabilities. Seven times eight is 56, and "
    "the capital of France is Paris. def add(a, b): return a + b"
)
RANDOM_TOKENS = 48
DISTINCT = 16
WIDEST_WINDOW = 1024  # tokens; a wider sliding window is not reached
SHOWN = 12


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings = json.loads(options.engine)
        if not isinstance(settings, dict):
            raise ValueError("is no JSON object")
    except ValueError as error:
        print(f"flashpatch-verify exact: --engine {options.engine}: {error}", file=sys.stderr)
        return USAGE
    try:
        certificate = certify(options.model, options.prompt, settings, options.syncs)
    except (OSError, ImportError) as error:
        print(f"flashpatch-verify exact: {error}", file=sys.stderr)
        return USAGE
    emit(certificate.as_json(), tables(certificate), options.json)
    return AGREE if certificate.ok else DIFFER


def certify(model: str, prompt: str = "", engine: dict[str, Any] | None = None, syncs: int = 0) -> Any:
    """Open an engine and the Hugging Face model on the same checkpoint, and return their `Certificate`.

    Args:
        model: path or name of a checkpoint that transformers loads unquantized.
        prompt: text to compare on; "" takes a built-in one, or random tokens if the model has no tokenizer.
        engine: arguments of `vllm.LLM`; ``model`` among them is another checkpoint for it, ``adapter`` the folder of a LoRA
            adapter that it serves.
        syncs: how often the same weights are loaded into the engine, after which no module may return other bits.
    """
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from flashpatch.verify.exact import engine as rollout
    from flashpatch.verify.exact.certificate import compare

    ids = tokens(model, prompt or TEXT)
    settings = {"model": model, "dtype": "bfloat16", "max_model_len": max(len(ids) + 8, 64), **(engine or {})}
    adapter = settings.pop("adapter", "")
    with rollout.opened(**({"enable_lora": True} if adapter else {}), **settings) as llm:
        seen = rollout.prefill(llm, ids, adapter)
        changes = rollout.first_changes(llm, ids, seen, model, syncs, adapter)

    def load(dtype: torch.dtype) -> torch.nn.Module:
        # torch's own attention, the default, leaves caps on scores away.
        eager = {"attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **eager).eval()

    return replace(compare(load, ids, seen), syncs=tuple(changes))


def tokens(model: str, text: str) -> list[int]:
    """Return the text's tokens; tokens drawn at random if they reach past no sliding window, or the tokenizer knows too few words.

    Equal tokens give equal values, which attention averages to the same whatever it attends to.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model).get_text_config()
    size, window = config.vocab_size, getattr(config, "sliding_window", None) or 0
    least = window + DISTINCT if window <= WIDEST_WINDOW else 0
    try:
        ids = AutoTokenizer.from_pretrained(model).encode(text)
    except (OSError, ValueError):
        ids = []
    if len(set(ids)) >= DISTINCT and max(ids) < size and len(ids) >= least:
        return ids
    count = max(RANDOM_TOKENS, least)
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def tables(certificate: Any) -> list[Table]:
    """Return what is printed: the verdict, and the places that differ or, if none does, those that come nearest to it."""
    worst = [place for place in certificate.places if place.differs][:SHOWN]
    shown = worst or sorted(certificate.places, key=lambda place: -place.gap / place.bound)[:3]
    rows = [
        (place.name, f"{place.gap:.1e}", f"{place.bound:.1e}", "yes" if place.differs else "no")
        for place in shown
    ]
    first = certificate.first
    verdict = f"first differs: {first.name}" if first else "engine and trainer agree to rounding"
    numbers = [
        ("mean KL, nats", f"{certificate.kl:.1e}", f"{certificate.kl_rounding:.1e}"),
        (
            "log-probability of the likeliest token, nats",
            f"{certificate.largest:.1e}",
            f"{certificate.largest_rounding:.1e}",
        ),
    ]
    synced = [(str(at), change or "nothing") for at, change in enumerate(certificate.syncs, 1)]
    return [
        Table(certificate.problem or verdict, ("distributions", "differ by", "by rounding alone"), numbers),
        Table("Places", ("place", "gap", "bound", "differs"), rows),
        *([Table("Syncs of the same weights", ("sync", "first changed"), synced)] if synced else []),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashpatch-verify exact",
        description="Compare vLLM with the Hugging Face model that a trainer trains, and name the first module that differs.",
        epilog="Exit status: 0 they agree to rounding, 1 they differ or cannot be compared, 2 wrong use.",
    )
    parser.add_argument("model", help="path or name of a checkpoint")
    parser.add_argument("--prompt", default="", help="text to compare on (default: a built-in one)")
    parser.add_argument(
        "--engine",
        default="{}",
        metavar="JSON",
        help='arguments of vllm.LLM, as {"quantization": "fp8"} (default: none)',
    )
    parser.add_argument(
        "--syncs",
        type=int,
        default=0,
        metavar="N",
        help="also load the same weights into the engine N times, which may change nothing",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
