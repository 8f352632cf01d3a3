"""How what FlashPatch does grows with ranks, samples and weights, and what bounds it at 1,024 ranks.

    python benchmarks/growth.py [--parts NAME,...] [--repeats 3] [--json]

Every part runs FlashPatch's own code, in one process, at several sizes: an update and the opening of an engine, the audit
of a sync on both sides, the ledger and its verdict, the balancer, the packer, the report. Nothing goes over a network and no
model computes, so what is timed is FlashPatch's share. The processor time of a size is the least of the repeats; the
exponent is that of the least squares line through the upper half of the sizes, on logarithms, as what is fixed counts at small
ones. "work" is the exponent of what has to be done: an update of twice as many tensors has twice as much to do, a placement among
twice as many workers has not. A part that grows faster than its work by more than 0.25 is named.

"at the limit" is the time at the largest size in question, on the line through the measured ones: 1,024 ranks, a million
samples or requests, and what a model of 10^12 weights has: 61 layers of 384 experts are 70,000 tensors, in 1,000 buckets of 2 GB,
and a rank of 1,024 holds 10^9 of them. The last lines have what bounds a job there: the parts that take longest.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence

import quick
import torch
from growing import jobs, weights

from flashpatch.commands.report import Table, emit

PARTS = {**weights.PARTS, **jobs.PARTS}
SIZES = {
    "tensors": (128, 512, 2048, 8192),
    "bf16 values": (2**20, 2**22, 2**24, 2**26),
    "layers": (32, 128, 512, 2048),
    "experts of a layer": (16, 64, 256, 1024),
    "buckets of 512 layers": (4, 16, 64, 256),
    "replicas": (1, 8, 32, 128),
    "workers": (16, 64, 256, 1024),
    "ranks": (16, 64, 256, 1024),
    "requests": (1000, 10_000, 100_000, 1_000_000),
    "samples": (1000, 10_000, 100_000, 1_000_000),
    "processes": (16, 64, 256, 1024),
}
LIMITS = {"tensors": 70_000, "bf16 values": 10**9, "buckets of 512 layers": 1000}
"""Where it is more than the largest size."""
FASTER = 0.25
ENOUGH = 20.0
"""Seconds at one size after which it is not repeated."""


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope through the upper half of the sizes, at least two, on logarithms."""
    half = max(2, -(-len(sizes) // 2))
    x, y = ([math.log(value) for value in values[-half:]] for values in (sizes, seconds))
    middle_x, middle_y = sum(x) / half, sum(y) / half
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle_x) ** 2 for a in x)


def least(make: Callable[[int], Callable[[], object]], size: int, repeats: int) -> float:
    """Return the least processor time of one size, in seconds; the garbage collector runs between, not within."""
    work, taken = make(size), []
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        began = time.process_time()
        work()
        taken.append(max(time.process_time() - began, 1e-7))
        gc.enable()
        if sum(taken) > ENOUGH:
            break
    return min(taken)


def main() -> None:
    """Measure the parts and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}; all if left out; separated by ';'")
    parser.add_argument("--sizes", type=int, default=4, help="how many of the four sizes, the least first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = quick.parse(parser, sizes=2, repeats=1)
    torch.set_num_threads(1)
    wanted = given.parts.split(";") if given.parts else list(PARTS)
    if unknown := set(wanted) - PARTS.keys():
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    found = {}
    for name in wanted:
        what, make, work = PARTS[name]
        sizes = SIZES[what][: given.sizes]
        seconds = [least(make, size, given.repeats) for size in sizes]
        slope = exponent(sizes, seconds)
        print(f"{name}: {slope:.2f}", file=sys.stderr, flush=True)
        limit = max(LIMITS.get(what, 0), SIZES[what][-1])
        reached = seconds[-1] * (limit / sizes[-1]) ** (slope if limit > sizes[-1] else 0)
        found[name] = {"grows": what, "work": work, "sizes": sizes, "seconds": seconds, "exponent": slope}
        found[name] |= {"limit": limit, "at limit": reached, "faster": slope > work + FASTER}
    rows = [
        (
            name,
            one["grows"],
            f"{one['sizes'][0]:,} to {one['sizes'][-1]:,}",
            *(f"{1e3 * one['seconds'][at]:.2f}" for at in (0, -1)),
            f"{one['exponent']:.2f}",
            f"{one['work']}",
            f"{one['at limit']:.2f} at {one['limit']:,}",
        )
        for name, one in found.items()
    ]
    columns = ("part", "what grows", "sizes", "ms, first", "ms, last", "exponent", "work", "at the limit, s")
    emit(found, [Table("Processor time, one thread", columns, rows)], given.json)
    if not given.json:
        faster = [name for name, one in found.items() if one["faster"]]
        print(f"faster than its work: {', '.join(faster) or 'nothing'}")
        longest = sorted(found, key=lambda name: -found[name]["at limit"])[:3]
        print(
            "longest at the limit: "
            + ", ".join(f"{name} {found[name]['at limit']:.1f} s" for name in longest)
        )


if __name__ == "__main__":
    main()
