"""Divide numbers into parts whose sums are nearly equal.

Two classical ways, and a search that improves what they give: longest processing time first (Graham, 1969),
the largest differencing method (Karmarkar and Karp, 1982; what verl uses), moves and swaps between full and
empty parts. The best of them is taken, so that the result is never worse than any of them.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

Parts = list[list[int]]


def balance(
    sizes: Sequence[int],
    parts: int,
    limit: int | None = None,
    start: Parts | None = None,
    *,
    enough: float = 0.0,
    differences: int = 1_000_000,
) -> Parts:
    """Divide items into ``parts`` lists of item numbers.

    Args:
        sizes: positive integers.
        parts: at most ``len(sizes)``; every part gets at least one item.
        limit: largest sum a part may have; None for no limit.
        start: a division that keeps the limit, given back when nothing better is found.
        enough: stop at a largest sum this share above the least that any division can have.
        differences: differencing costs about items times parts; beyond this product it is left out.

    Returns:
        The division with the smallest largest sum that was found. With a limit and no ``start``, one that
        breaks the limit when none was found that keeps it.

    Raises:
        ValueError: more parts than items.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"{len(sizes)} items cannot fill {parts} parts")
    target = math.floor((1 + enough) * max(max(sizes), -(-sum(sizes) // parts)))
    best, height = start, _height(sizes, start) if start is not None else math.inf
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    ways = [longest_first]
    if len(sizes) * parts <= differences:
        ways.append(differencing)
    for way in ways:
        if height <= target:
            break
        found = level(sizes, way(sizes, parts, order), target)
        reached = _height(sizes, found)
        if reached < height and (start is None or limit is None or reached <= limit):
            best, height = found, reached
    assert best is not None
    return best


def longest_first(sizes: Sequence[int], parts: int, order: Sequence[int] | None = None) -> Parts:
    """Give the smallest part the largest item left; at most 4/3 of the optimum."""
    if order is None:
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
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
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
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


def level(
    sizes: Sequence[int], division: Parts, target: int = 0, rounds: int = 12, partners: int = 4
) -> Parts:
    """Move or swap items between full and empty parts until no part is above ``target``.

    In each round the fullest part meets the emptiest, the next fullest the next emptiest, and so on. When
    nothing can be gained so, each meets another partner, at most ``partners`` in turn.
    """
    parts = [sorted(part, key=sizes.__getitem__) for part in division]
    loads = [sum(map(sizes.__getitem__, part)) for part in parts]
    half, shift = len(parts) // 2, 0
    for _ in range(rounds):
        order = sorted(range(len(parts)), key=loads.__getitem__)
        gained = False
        for at in range(half):
            full, other = order[-1 - at], order[(at + shift) % half]
            if loads[full] <= target:
                break
            gained = _exchange(sizes, parts, loads, full, other) or gained
        shift = 0 if gained else shift + 1
        if shift >= min(partners, half):
            break
    return parts


def _exchange(sizes: Sequence[int], parts: Parts, loads: list[int], full: int, other: int) -> bool:
    """Bring two parts closer together by the best single move or swap; False when there is none."""
    many, few = parts[full], parts[other]
    gap = best = loads[full] - loads[other]  # best: how far apart they are afterwards
    chosen: tuple[int, int | None] | None = None  # item, and the partner that comes for it
    at = len(few) - 1
    for item in reversed(many):
        size = sizes[item]
        if abs(gap - 2 * size) < best and len(many) > 1:
            best, chosen = abs(gap - 2 * size), (item, None)
        # The partner whose exchange halves the gap has size - gap / 2; both its neighbours are tried.
        while at >= 0 and 2 * sizes[few[at]] > 2 * size - gap:
            at -= 1
        for partner in few[max(at, 0) : at + 2]:
            left = abs(gap - 2 * (size - sizes[partner]))
            if left < best:
                best, chosen = left, (item, partner)
    if chosen is None:
        return False
    item, partner = chosen
    many.remove(item)
    _insert(sizes, few, item)
    moved = sizes[item]
    if partner is not None:
        few.remove(partner)
        _insert(sizes, many, partner)
        moved -= sizes[partner]
    loads[full] -= moved
    loads[other] += moved
    return True


def _height(sizes: Sequence[int], division: Parts) -> int:
    return max(sum(map(sizes.__getitem__, part)) for part in division)


def _insert(sizes: Sequence[int], part: list[int], item: int) -> None:
    part.insert(bisect_left(part, sizes[item], key=sizes.__getitem__), item)


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
