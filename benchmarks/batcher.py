"""The streaming batcher against verl's balancing of complete batches, and against the offline bounds.

    python benchmarks/batcher.py [--ranks 8 64] [--sizes 1000] [--budget 16784] [--verl-limit 160000] [--json]

Long-tailed lengths (`longtail.py`). verl divides a complete batch over ranks with
``get_seqlen_balanced_partitions``, then each rank's share into micro-batches under the budget, the same
number on all ranks, as ``rearrange_micro_batches`` does. Columns:

    us/sample   processor time to pack, per sample
    forwards    per rank, relative to the least possible, ceil(tokens / (ranks * budget))
    idle        share of rank time lost to waiting for the fullest rank, over all forwards
    padding     tokens wasted if every batch of a round is padded to the fullest
    first       share of the samples that must have come before the first batch can leave
    worse       rounds in which verl's algorithm on the same samples has a lower fullest rank"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

import longtail
import quick

from flashpatch.commands.report import Table, emit
from flashpatch.patches.grpo.streaming.packing import Packer

AIM = 5.0
"""Processor microseconds per sample."""

SIZES = (1000, 10_000, 100_000, 1_000_000)
RANKS = (8, 64, 256, 1024)


def streaming(lengths: list[int], ranks: int, budget: int) -> tuple[list[list[list[int]]], float, int]:
    """Rounds as lists of lengths per rank, seconds, and after how many samples the first one left."""
    packer, rounds, first = Packer(ranks, budget), [], len(lengths)
    began = time.process_time()
    for number, tokens in enumerate(lengths, 1):
        for done in packer.add(tokens, tokens):
            first = min(first, number)
            rounds.append(done)
    last = packer.flush()
    seconds = time.process_time() - began
    rounds += [last] if last else []
    return [[[] if one.filler else list(one.samples) for one in done] for done in rounds], seconds, first


def complete(lengths: list[int], ranks: int, budget: int) -> tuple[list[list[list[int]]], float]:
    """The same from verl's balancing."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    began = time.process_time()
    shares = [
        [lengths[item] for item in part] for part in get_seqlen_balanced_partitions(lengths, ranks, False)
    ]
    number = max(-(-sum(share) // budget) for share in shares)
    while True:
        micro = [get_seqlen_balanced_partitions(share, number, False) for share in shares]
        sums = [
            [sum(share[item] for item in part) for part in parts]
            for share, parts in zip(shares, micro, strict=True)
        ]
        if max(map(max, sums)) <= budget:
            break
        number += 1
    seconds = time.process_time() - began
    batches = [
        sorted(([share[item] for item in part] for part in parts), key=sum, reverse=True)
        for share, parts in zip(shares, micro, strict=True)
    ]
    return [list(together) for together in zip(*batches, strict=True)], seconds


def figures(rounds: list[list[list[int]]], lengths: list[int], ranks: int, budget: int) -> dict[str, float]:
    tallest = [max(map(sum, done)) for done in rounds]
    longest = [max(max(row, default=0) for row in done) * sum(map(len, done)) for done in rounds]
    total = sum(lengths)
    return {
        "forwards": len(rounds) / -(-total // (ranks * budget)),
        "idle": 1 - total / (ranks * sum(tallest)),
        "padding": 1 - total / sum(longest),
    }


def worse(rounds: list[list[list[int]]]) -> tuple[int, float]:
    """Rounds in which verl's algorithm does better on the same samples, and the largest ratio of fullest
    ranks."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    number, ratio = 0, 0.0
    for done in rounds:
        if not all(done):
            continue
        items = [length for row in done for length in row]
        theirs = max(
            sum(items[at] for at in part) for part in get_seqlen_balanced_partitions(items, len(done), False)
        )
        mine = max(map(sum, done))
        number += mine > theirs
        ratio = max(ratio, mine / theirs)
    return number, ratio


def ways(
    lengths: list[int], ranks: int, given: argparse.Namespace, peer: bool
) -> list[tuple[str, dict[str, float], str]]:
    """Pack one set of samples in each way; return names, figures, and the last column."""
    cases, size = {"ours": streaming(lengths, ranks, given.budget)}, len(lengths)
    if peer:
        cases["verl, complete"] = (*complete(lengths, ranks, given.budget), size)
    found = []
    for name, (rounds, seconds, first) in cases.items():
        one = figures(rounds, lengths, ranks, given.budget)
        one |= {"us": seconds / size * 1e6, "first": first / size}
        text = "-"
        if peer and name == "ours":
            one["worse"], one["ratio"] = worse(rounds)
            text = f"{one['worse']} of {len(rounds)}, at most x{one['ratio']:.4f}"
        found.append((name, one, text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--budget", type=int, default=16_384 + 400)
    parser.add_argument(
        "--verl-limit",
        type=int,
        default=160_000,
        help="samples times ranks beyond which verl's balancing is left out; it is slow there",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", action="store_true")
    given = quick.parse(parser, ranks=[8], sizes=[512])
    rows, data = [], []
    verl = find_spec("verl") is not None
    for size in given.sizes:
        lengths = [a + b for a, b in zip(longtail.responses(size), longtail.prompts(size), strict=True)]
        for ranks in given.ranks:
            peer = verl and size * ranks <= given.verl_limit
            for name, one, text in ways(lengths, ranks, given, peer):
                data.append({"size": size, "ranks": ranks, "way": name} | one)
                shown = [f"{one['us']:.1f}", f"x{one['forwards']:.2f}", f"{one['idle']:.2%}"]
                shown += [f"{one['padding']:.0%}", f"{one['first']:.1%}"]
                rows.append([f"{size}", f"{ranks}", name, *shown, text])
    columns = ["samples", "ranks", "way", "us/sample", "forwards", "idle", "padding", "first", "worse"]
    slow = [one for one in data if one["way"] == "ours" and one["us"] > AIM]
    title = f"{given.budget} tokens per batch; aims: {AIM:.0f} us, balanced as by verl, ready earlier"
    emit(data, [Table(title, columns, rows)], given.json)
    if not given.json:
        print(f"{len(slow)} aims missed")
        print(*(f"{one['size']} samples, {one['ranks']} ranks: {one['us']:.1f} us" for one in slow), sep="\n")


if __name__ == "__main__":
    main()
