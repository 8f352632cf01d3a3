"""What the check of a LoRA adapter costs before it is put in place, beside copying its values.

    python benchmarks/adapter.py [--quick] [--rank 32] [--layers 24] [--rounds 60] [--json]

Needs torch. An adapter in bf16 for all linear layers of a random Qwen2 of 350 million weights; one thread, processor time. In each round
all parts take turns, so that none finds its tensors in the cache; shown are medians, and for ``check / copy`` the quartiles of the rounds
too. ``read`` looks for NaN and infinity and names the content of the values, ``check`` is all that an engine's rank does at each sync. Without
the package xxhash content is named in another way, which takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import quick
import torch

from flashpatch.commands.report import Table, emit
from flashpatch.patches.fp8.lora import check, values

AIM = 1.3  # of check / copy
SHAPES = ((1024, 1024), (256, 1024), (256, 1024), (1024, 1024), (2816, 1024), (2816, 1024), (1024, 2816))
PARTS = ("copy", "read", "check")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    given = quick.parse(parser, layers=2, rounds=3)
    torch.set_num_threads(1)
    result = measure(adapter(given.rank, given.layers), given.rank, given.rounds)
    title = f"The check of a LoRA adapter, processor time in ms; aim: check / copy below {AIM}"
    low, middle, high = result["check / copy"]
    row = [
        f"{result['MiB']:.1f}",
        "no" if values.xxhash is None else "yes",
        *(f"{result[part]:.2f}" for part in PARTS),
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
    ]
    emit([result], [Table(title, ("MiB", "xxhash", *PARTS, "check / copy"), [row])], given.json)


def adapter(rank: int, layers: int) -> dict[str, check.Pair]:
    """Random matrices by the names of modules."""
    torch.manual_seed(0)
    return {
        f"layers.{layer}.{at}": check.Pair(
            torch.randn(rank, inputs).bfloat16(), torch.randn(outputs, rank).bfloat16(), 2.0
        )
        for layer in range(layers)
        for at, (outputs, inputs) in enumerate(SHAPES)
    }


def measure(pairs: dict[str, check.Pair], rank: int, rounds: int) -> dict[str, Any]:
    """The columns for one adapter."""
    tensors = [tensor for pair in pairs.values() for tensor in (pair.a, pair.b)]
    room = [torch.empty_like(tensor) for tensor in tensors]
    places, config = dict.fromkeys(pairs), {"r": rank, "lora_alpha": 2 * rank}
    parts: dict[str, Callable[[], Any]] = {
        "copy": lambda: [to.copy_(tensor) for to, tensor in zip(room, tensors, strict=True)],
        "read": lambda: check.read(pairs),
        "check": lambda: check.checked("policy", pairs, places, config, "benchmark"),
    }
    taken = [{part: spent(work) for part, work in parts.items()} for _ in range(rounds)]
    ratios = statistics.quantiles([one["check"] / one["copy"] for one in taken])
    medians = {part: statistics.median(one[part] for one in taken) for part in parts}
    return {"MiB": sum(tensor.nbytes for tensor in tensors) / 2**20, **medians, "check / copy": ratios}


def spent(work: Callable[[], Any]) -> float:
    """Processor time in ms."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


if __name__ == "__main__":
    main()
