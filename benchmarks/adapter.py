"""What the check of a LoRA adapter costs before it is put in place, beside copying its values.

    python benchmarks/adapter.py [--quick] [--rank 32] [--layers 24] [--rounds 60] [--json]

Needs torch. An adapter in bf16 for all linear layers of a random Qwen2 of 350 million weights; one thread, processor time, the least of all
rounds. ``joined`` copies the values into one tensor, ``finite`` looks for NaN and infinity, ``digest`` names the content; ``check`` is all of
it, as an engine's rank does it at each sync.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import quick
import torch

from flashpatch.commands.report import Table, emit
from flashpatch.patches.fp8.lora import check

AIM = 1.3  # of check / copy
SHAPES = ((1024, 1024), (256, 1024), (256, 1024), (1024, 1024), (2816, 1024), (2816, 1024), (1024, 2816))
COLUMNS = ("copy", "joined", "finite", "digest", "check", "check / copy")


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
    row = [f"{result['MiB']:.1f}", *(f"{result[name]:.2f}" for name in COLUMNS)]
    emit([result], [Table(title, ("MiB", *COLUMNS), [row])], given.json)


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
    values = check.joined(pairs)
    parts: dict[str, Callable[[], Any]] = {
        "copy": lambda: [to.copy_(tensor) for to, tensor in zip(room, tensors, strict=True)],
        "joined": lambda: check.joined(pairs),
        "finite": lambda: check.problems(pairs, values, places, config),
        "digest": lambda: check.digest(pairs, values),
        "check": lambda: check.checked("policy", pairs, places, config, "benchmark"),
    }
    taken = {name: least(work, rounds) for name, work in parts.items()}
    size = sum(tensor.nbytes for tensor in tensors) / 2**20
    return {"MiB": size, **taken, "check / copy": taken["check"] / taken["copy"]}


def least(work: Callable[[], Any], rounds: int) -> float:
    """The least processor time of some rounds, in ms."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times) * 1000


if __name__ == "__main__":
    main()
