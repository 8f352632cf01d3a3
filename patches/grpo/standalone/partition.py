"""Divide numbers into parts whose sums are nearly equal.

Three classical ways, and a search that improves what they give: longest processing time first (Graham, 1969),
the largest differencing method (Karmarkar and Karp, 1982; what verl uses), moves and swaps between the
fullest part and the others. The best of them is taken, so that the result is never worse than any of them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_LARGEST = 1_000_000
"""Differencing costs about items times parts; beyond this product it is left out."""

Parts = list[list[int]]


def balance(sizes: Sequence[int], parts: int, limit: int | None = None, start: Parts | None = None) -> Parts:
    """Divide items into ``parts`` lists of item numbers.

    Args:
        sizes: positive integers.
        parts: at most ``len(sizes)``; every part gets at least one item.
        limit: largest sum a part may have; None for no limit.
        start: a division that keeps the limit, given back when nothing better is found.

    Returns:
        The division with the smallest largest sum that was found. With a limit and no ``start``, one that
        breaks the limit when none was found that keeps it.

    Raises:
        ValueError: more parts than items.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"{len(sizes)} items cannot fill {parts} parts")
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    found = [longest_first(sizes, parts, order)]
    if len(sizes) * parts <= _LARGEST:
        found.append(differencing(sizes, parts, order))
    found = [improve(sizes, one) for one in found]
    if start is not None:
        found.append([list(part) for part in start])

    def height(one: Parts) -> int:
        return max(sum(sizes[item] for item in part) for part in one)

    best = min(found, key=height)
    return start if start is not None and limit is not None and height(best) > limit else best


def longest_first(sizes: Sequence[int], parts: int, order: Sequence[int] | None = None) -> Parts:
    """The largest item left goes to the smallest part; at most 4/3 of the optimum."""
    if order is None:
        order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    heap = [(0, part) for part in range(parts)]
    found: Parts = [[] for _ in range(parts)]
    for item in order:
        load, part = heap[0]
        found[part].append(item)
        heapq.heapreplace(heap, (load + sizes[item], part))
    return found


def differencing(sizes: Sequence[int], parts: int, order: Sequence[int] | None = None) -> Parts:
    """Join, again and again, the two partial divisions with the largest spread, largest sums with smallest
    ones."""
    if order is None:
        order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    # Partial divisions: minus the spread, and for ties minus the largest sum and an age; then the parts as
    # (sum, number of items, tree of items) ascending.
    heap: list = []
    for age, item in enumerate(order):
        empty = [(0, 0, None)] * (parts - 1)
        heap.append((-sizes[item], -sizes[item], age, [*empty, (sizes[item], 1, item)]))
    heapq.heapify(heap)
    age = len(order)
    while len(heap) > 1:
        *_, one = heapq.heappop(heap)
        *_, two = heapq.heappop(heap)
        joined = [
            (low + high, fewer + more, _both(few, many))
            for (low, fewer, few), (high, more, many) in zip(one, reversed(two), strict=True)
        ]
        joined.sort(key=_sum_and_number)
        age += 1
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], -joined[-1][0], age, joined))
    found = [_items(tree) for *_, tree in heap[0][-1]]
    return found if all(found) else longest_first(sizes, parts, order)


def improve(sizes: Sequence[int], division: Parts, rounds: int | None = None) -> Parts:
    """Move or swap items of the fullest part while that lowers it; partners are tried from the emptiest part
    on."""
    parts = [sorted(part, key=sizes.__getitem__) for part in division]
    loads = [sum(sizes[item] for item in part) for part in parts]
    for _ in range(rounds if rounds is not None else 4 * len(parts)):
        fullest = max(range(len(parts)), key=loads.__getitem__)
        partners = heapq.nsmallest(
            4, (part for part in range(len(parts)) if part != fullest), key=loads.__getitem__
        )
        if not any(_exchange(sizes, parts, loads, fullest, partner) for partner in partners):
            break
    return parts


def _exchange(sizes: Sequence[int], parts: Parts, loads: list[int], full: int, other: int) -> bool:
    """Bring two parts closer together by the best single move or swap; False when there is none."""
    gap = loads[full] - loads[other]
    best: tuple[int, int, int | None] | None = None  # distance from the middle, item, partner
    keys = [sizes[item] for item in parts[other]]
    for item in parts[full]:
        if len(parts[full]) > 1 and 0 < sizes[item] < gap:
            best = min(best or (gap, 0, None), (abs(gap - 2 * sizes[item]), item, None), key=_first)
        # The partner whose exchange halves the gap: of size sizes[item] - gap / 2.
        at = bisect_left(keys, sizes[item] - gap / 2)
        for near in (at - 1, at):
            if 0 <= near < len(keys) and 0 < sizes[item] - keys[near] < gap:
                distance = abs(gap - 2 * (sizes[item] - keys[near]))
                best = min(best or (gap, 0, None), (distance, item, parts[other][near]), key=_first)
    if best is None or best[0] >= gap:
        return False
    _, item, partner = best
    parts[full].remove(item)
    if partner is not None:
        parts[other].remove(partner)
        _insert(sizes, parts[full], partner)
    _insert(sizes, parts[other], item)
    moved = sizes[item] - (0 if partner is None else sizes[partner])
    loads[full] -= moved
    loads[other] += moved
    return True


def _insert(sizes: Sequence[int], part: list[int], item: int) -> None:
    part.insert(bisect_left(part, sizes[item], key=sizes.__getitem__), item)


def _first(candidate: tuple) -> int:
    return candidate[0]


def _sum_and_number(part: tuple) -> tuple[int, int]:
    return part[:2]


def _both(one: object, two: object) -> object:
    return two if one is None else one if two is None else (one, two)


def _items(tree: object) -> list[int]:
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            found.append(node)
    return found
