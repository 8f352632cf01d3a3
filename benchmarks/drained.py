"""How long replicas of a fleet rest in a step's rollouts, while others finish: a simulation.

    python benchmarks/drained.py [--answers 64] [--steps 200]

Lengths are those of `longtail`. Each replica generates its answers at once, and a decode step takes as long whatever is left
of the batch, as where an accelerator waits for memory: a replica ends with its longest answer, the rollouts with the last
replica. Means over steps, in shares of the rollouts' time: when the ``first`` and when ``half`` of the replicas have drained,
and ``rest``, what all of them rest.
"""

from __future__ import annotations

from statistics import fmean, median

import longtail
import quick

FLEETS = (2, 8, 64, 256)


def step(replicas: int, answers: int, seed: int) -> tuple[float, float, float]:
    """Return when the first and half of the replicas have drained, and the share of all their time that they rest."""
    lengths = longtail.responses(replicas * answers, seed)
    ends = [max(lengths[one * answers : (one + 1) * answers]) for one in range(replicas)]
    last = max(ends)
    return min(ends) / last, median(ends) / last, 1 - fmean(ends) / last


def main() -> None:
    """Print a row for each fleet."""
    parser = quick.parser(__doc__)
    parser.add_argument("--answers", type=int, default=64, help="of each replica (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    given = quick.parse(parser, steps=10)
    print(f"{'replicas':>8} {'first':>6} {'half':>6} {'rest':>6}")
    for replicas in FLEETS:
        steps = [step(replicas, given.answers, seed) for seed in range(given.steps)]
        first, half, rest = (fmean(column) for column in zip(*steps, strict=True))
        print(f"{replicas:8} {first:6.2f} {half:6.2f} {rest:6.2f}")


if __name__ == "__main__":
    main()
