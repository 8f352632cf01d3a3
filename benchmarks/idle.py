"""How long training ranks idle, with complete batches and with the streaming batcher, 8 to 1,024 ranks.

    python benchmarks/idle.py [--per-rank 128] [--slots 32] [--speed 1.25] [--steps 6] [--json]
    python benchmarks/idle.py --recorded TRACE --ranks 2 4 --slots 16 --budget 512

A simulation in virtual time, driven by long-tailed response lengths (`longtail.py`), or by those that a job
recorded, whose steps and requests then take the place of ``--steps`` and ``--per-rank``. Generation has workers
of its own, ``--slots`` sequences per training rank at once, each at one token per unit of time, first come
first served. A rank trains ``speed * slots`` tokens per unit of time, so that training is ``speed`` times as
fast as generation. Every step trains ``--per-rank`` samples per rank. Forwards are synchronous over ranks, as
FSDP's are: a round lasts as long as its fullest rank, and rounds are balanced as well as can be.

    complete     a step trains when its last sample is there (verl, all trainer modes)
    streaming    a step's rounds start as soon as they are full

    on policy    samples of a step start when the step before has been trained
    one ahead    samples of a step start one step earlier

Idle is the share of all ranks' time in which they compute nothing.
"""

from __future__ import annotations

import argparse
import heapq
from pathlib import Path

import longtail
import quick
import router_traces

from flashpatch.commands.report import Table, emit
from flashpatch.patches.grpo.streaming.packing import Packer

RANKS = (8, 64, 256, 1024)


def pack(came: list[tuple[float, int]], ranks: int, budget: int) -> list[tuple[float, int, int]]:
    """Rounds as (when it is complete, its fullest rank's tokens, all its tokens)."""
    packer, rounds, now = Packer(ranks, budget), [], 0.0
    for when, tokens in came:
        for done in packer.add(tokens, tokens):
            rounds.append((when, done))
        now = when
    last = packer.flush()
    rounds += [(now, last)] if last else []
    return [
        (
            when,
            max(one.tokens for one in done if not one.filler),
            sum(one.tokens for one in done if not one.filler),
        )
        for when, done in rounds
    ]


def drawn(number: int, steps: int) -> list[list[tuple[int, int]]]:
    """Steps of ``number`` samples: tokens of the response, and of the prompt."""
    return [
        list(zip(longtail.responses(number, step), longtail.prompts(number, step), strict=True))
        for step in range(steps)
    ]


def recorded(path: Path) -> list[list[tuple[int, int]]]:
    """As `drawn`, from a file of grpo's router_trace."""
    return [[(sum(one.turns), one.tokens) for one in step] for step in router_traces.recorded(path)]


def train(
    samples: list[list[tuple[int, int]]], ranks: int, given: argparse.Namespace, ahead: int, streaming: bool
) -> tuple[float, float]:
    """Idle share and duration of all steps."""
    free = [0.0] * (ranks * given.slots)  # when each slot of generation is free
    rate, ends, now, work = given.speed * given.slots, [], 0.0, 0.0
    for step, requests in enumerate(samples):
        allowed = ends[step - 1 - ahead] if step > ahead else 0.0
        came = []
        for length, prompt in requests:
            done = max(free[0], allowed) + length
            heapq.heapreplace(free, done)
            came.append((done, length + prompt))
        came.sort()
        for when, fullest, total in pack(came, ranks, given.budget):
            now = max(now, when if streaming else came[-1][0]) + fullest / rate
            work += total / rate
        ends.append(now)
    return 1 - work / (ranks * now), now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-rank", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--speed", type=float, default=1.25)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--budget", type=int, default=16_384 + 400, help="tokens per batch (default %(default)s)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--recorded", type=Path, help="a file of grpo's router_trace")
    parser.add_argument("--json", action="store_true")
    given = quick.parse(parser, per_rank=16, steps=2, ranks=[8])
    rows, data = [], []
    for ranks in given.ranks:
        samples = recorded(given.recorded) if given.recorded else drawn(ranks * given.per_rank, given.steps)
        for name, ahead in (("on policy", 0), ("one ahead", 1)):
            complete, streaming = (train(samples, ranks, given, ahead, flag) for flag in (False, True))
            data.append({"ranks": ranks, "mode": name, "complete": complete, "streaming": streaming})
            ratio = streaming[1] / complete[1]
            rows.append([str(ranks), name, f"{complete[0]:.1%}", f"{streaming[0]:.1%}", f"{ratio:.2f}"])
    title = (
        str(given.recorded)
        if given.recorded
        else (
            f"{given.per_rank} samples per rank and step, lengths log-normal: median {longtail.MEDIAN}, "
            f"99% below {longtail.P99}, cut at {longtail.LONGEST}"
        )
    )
    columns = ["ranks", "mode", "idle, complete", "idle, streaming", "time / complete"]
    emit(data, [Table(title, columns, rows)], given.json)


if __name__ == "__main__":
    main()
