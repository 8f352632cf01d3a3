"""Drop arms whose captured graphs would not fit into a memory budget.

An engine captures a graph per arm and batch size, each with its own launch parameters and buffers. What one takes is
known only after capture, so it is estimated: graphs times layers times `LAYER_BYTES`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.arm import Arm

logger = logging.getLogger("flashpatch.eagle")

GIB = 1 << 30
LAYER_BYTES = 512 << 10
"""Assumed bytes of a graph per decoder layer, not measured: a log in vLLM's pull request 22897 shows 24 to 28 MiB per graph
for a model it does not name, which would be some 0.8 MiB for each of 32 layers."""


def estimate_bytes(arm: Arm, graphs: int, layers: int) -> int:
    """Return the bytes of an arm's graphs: the target's layers, and one of the drafter per draft step."""
    return graphs * (layers + arm.steps) * LAYER_BYTES


def arms_within(
    arms: Sequence[Arm],
    budget: float,
    graphs: Callable[[Arm], int],
    layers: int,
    required: Sequence[Arm] = (Arm.DISABLE,),
) -> tuple[Arm, ...]:
    """Return the arms whose graphs fit, and log and note in the ledger which were dropped.

    While they do not fit, the arm nearest in draft tokens to its smaller neighbour goes first, since that one does
    nearly its work; of equal ones the largest.

    Args:
        budget: GiB; 0 for any.
        graphs: number of graphs that the engine captures for an arm.
        layers: decoder layers of the target.
        required: arms that the engine captures whatever is asked.

    Raises:
        PatchError: the required arms and the smallest other do not fit.
    """
    if not budget or not layers:
        return tuple(arms)

    def size(arm: Arm) -> int:
        return estimate_bytes(arm, graphs(arm), layers)

    always = sum(size(arm) for arm in dict.fromkeys(required))
    kept = sorted((arm for arm in arms if arm not in required), key=lambda arm: (arm.draft_tokens, arm))
    dropped: list[Arm] = []
    while kept and always + sum(map(size, kept)) > budget * GIB:
        ratios = [(kept[at].draft_tokens / kept[at - 1].draft_tokens, -at) for at in range(1, len(kept))]
        dropped.append(kept.pop(-min(ratios)[1] if ratios else 0))
    total = always + sum(map(size, kept))
    if total > budget * GIB or (dropped and not kept):
        least = always + min(map(size, dropped or kept), default=0)
        raise PatchError(
            f"graph_memory={budget:g} GiB does not hold the graphs of one arm: estimated {least / GIB:.2f} GiB.",
            patch="eagle",
            target="graph_memory",
            advice="Raise it, name fewer sizes of graphs, or set adapt=false.",
        )
    if dropped:
        names = ", ".join(map(str, sorted(dropped)))
        text = f"graphs of {total / GIB:.2f} GiB (estimated) fit into graph_memory={budget:g} GiB without {names}"
        logger.warning("the bandit has fewer arms: %s", text)
        ledger.note(eagle_arms_dropped=text)
    return tuple(arm for arm in arms if arm not in dropped)


def reachable_sizes(sizes: Sequence[int], arm: Arm, guard: int) -> list[int]:
    """Return the graph sizes that batches can use under an arm: up to the first that holds the guard's largest batch.

    Args:
        sizes: batch sizes of graphs.
        guard: most draft tokens times batch size, see `Policy`.
    """
    ascending = sorted(sizes)
    if not arm.steps:
        return ascending
    return ascending[: bisect_left(ascending, guard // arm.draft_tokens) + 1]
