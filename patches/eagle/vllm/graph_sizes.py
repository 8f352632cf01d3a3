"""Count the graphs that vLLM captures for an arm, and drop arms beyond the memory budget."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.graph_budget import arms_within

MOST_TOKENS = 512  # of a graph, where the user names no sizes
MOST_REQUESTS = 1024  # in a batch, where the user names no limit: the largest that vLLM takes by itself


def arms_in_graphs(arms: tuple[Arm, ...], args: Any, layers: int, budget: float) -> tuple[Arm, ...]:
    """Return the arms whose graphs fit into ``budget`` GiB, of an engine with these ``EngineArgs``.

    An arm has a graph per size that vLLM captures (those the user names, else 1, 2, 4, by 8 up to 256 and by 16 up to 512
    tokens) up to its tokens of a full batch; an engine without graphs drops nothing.

    Raises:
        PatchError: not one arm fits.
    """
    if args.enforce_eager or not budget:
        return arms
    named = args.cudagraph_capture_sizes or args.compilation_config.cudagraph_capture_sizes
    sizes = named or (1, 2, 4, *range(8, 256, 8), *range(256, MOST_TOKENS + 1, 16))
    requests = args.max_num_seqs or MOST_REQUESTS

    def graphs(arm: Arm) -> int:
        return sum(size <= requests * (arm.steps + 1) for size in sizes)

    return arms_within(arms, budget, graphs, layers, [arm for arm in arms if arm == Arm.DISABLE])
