"""Divide numbers into parts whose sums are nearly equal.

Longest processing time first (Graham, 1969), and moves and swaps between full and empty parts.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Sequence

Parts = list[list[int]]


def balance(sizes: Sequence[int], start: Parts, enough: float = 0.0) -> Parts:
    """Divide items anew, into as many parts; the largest sum is at most that of ``start``.

    Args:
        sizes: positive integers.
        start: a division of the items' numbers, without an empty part.
        enough: stop at a largest sum this share above the least that any division can have.
    """
    parts = len(start)
    target = math.floor((1 + enough) * max(max(sizes), -(-sum(sizes) // parts)))
    levelled = level(sizes, start, target)
    if _height(sizes, levelled) <= target:
        return levelled
    anew = level(sizes, longest_first(sizes, parts), target)
    return min(levelled, anew, key=lambda division: _height(sizes, division))


def longest_first(sizes: Sequence[int], parts: int) -> Parts:
    """Give the smallest part the largest item left; at most 4/3 of the optimum."""
    heap = [(0, part) for part in range(parts)]
    found: Parts = [[] for _ in range(parts)]
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        load, part = heap[0]
        found[part].append(item)
        heapq.heapreplace(heap, (load + sizes[item], part))
    return found


def level(sizes: Sequence[int], division: Parts, target: int = 0) -> Parts:
    """Move or swap items between full and empty parts until no part is above ``target``.

    In each round the fullest part meets the emptiest, the next fullest the next emptiest, and so on. When
    nothing can be gained so, each meets another partner, at most four in turn.
    """
    parts = [sorted(part, key=sizes.__getitem__) for part in division]
    loads = [sum(map(sizes.__getitem__, part)) for part in parts]
    half, shift = len(parts) // 2, 0
    for _ in range(12):
        order = sorted(range(len(parts)), key=loads.__getitem__)
        gained = False
        for at in range(half):
            full, other = order[-1 - at], order[(at + shift) % half]
            if loads[full] <= target:
                break
            gained = _exchange(sizes, parts, loads, full, other) or gained
        shift = 0 if gained else shift + 1
        if shift >= min(4, half):
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
    insort(few, item, key=sizes.__getitem__)
    moved = sizes[item]
    if partner is not None:
        few.remove(partner)
        insort(many, partner, key=sizes.__getitem__)
        moved -= sizes[partner]
    loads[full] -= moved
    loads[other] += moved
    return True


def _height(sizes: Sequence[int], division: Parts) -> int:
    return max(sum(map(sizes.__getitem__, part)) for part in division)
