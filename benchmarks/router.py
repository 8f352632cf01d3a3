"""Routing against verl's balancer and the offline optimum: makespan of long-tailed requests, and cost of a
decision.

    python benchmarks/router.py [--workers 16] [--slots 32] [--requests 4096] [--json]

A simulation in virtual time; the routers are the real classes. A worker decodes up to ``slots`` requests at
once, each at the same speed, and queues the rest first come first served, as an engine does. Lengths are
long-tailed (`longtail.py`). The bound is what no schedule can beat: all work spread evenly, or the longest
request alone. Routers:

    verl                     GlobalRequestLoadBalancer: fewest requests, everything is handed out at once
    ours, lengths unknown    fewest outstanding tokens where every response is expected to have the mean
    length; a
                             threshold of 5/4 of the slots, so that what waits goes where there is room
    ours, lengths known      the same with each request's own length, submitted longest first

Scenarios: all workers equal; one worker at a third of the speed; conversations, of which each has four turns.
Aim: makespan within 10% of the bound with equal workers.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec

import longtail

from flashpatch.commands.report import Table, emit
from flashpatch.patches.grpo.routing.pool import Pool

AIM = 1.10


class Ours:
    """The pool behind `TokenBalancer` and `Registry`, with requests waiting first come first served."""

    def __init__(self, workers: int, most: int, slack: int, cost: Callable[[int], int]) -> None:
        self.pool, self.cost, self.waiting = Pool(most=most, slack=slack), cost, deque()
        for worker in range(workers):
            self.pool.add(str(worker))

    def submit(self, request: int, length: int, group: int) -> list[tuple[int, int]]:
        self.waiting.append((request, length, group))
        return self._serve()

    def done(self, request: int, worker: int) -> list[tuple[int, int]]:
        self.pool.release(request)
        return self._serve()

    def _serve(self) -> list[tuple[int, int]]:
        placed = []
        while self.waiting:
            request, length, group = self.waiting[0]
            name = self.pool.acquire(request, self.cost(length), prefix=group)
            if name is None:
                break
            self.waiting.popleft()
            placed.append((request, int(name)))
        return placed


class Verls:
    """verl's own balancer."""

    def __init__(self, workers: int) -> None:
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        self.balancer = GlobalRequestLoadBalancer({str(worker): None for worker in range(workers)})

    def submit(self, request: int, length: int, group: int) -> list[tuple[int, int]]:
        return [(request, int(self.balancer.acquire_server(str(group))[0]))]

    def done(self, request: int, worker: int) -> list[tuple[int, int]]:
        self.balancer.release_server(str(worker))
        return []


def simulate(
    router, lengths: list[int], speeds: list[float], slots: int, turns: int, first: list[int] | None
) -> tuple[float, float]:
    """Makespan in decoding steps, and seconds spent in the router. A group's next turn starts when one ends;
    groups are submitted in the order ``first``."""
    groups = len(lengths) // turns
    events: list[tuple[float, int, int, int]] = []
    order = itertools.count()
    busy, queued = [0] * len(speeds), [deque() for _ in speeds]
    now = spent = 0.0

    def start(worker: int, request: int) -> None:
        busy[worker] += 1
        heapq.heappush(events, (now + lengths[request] / speeds[worker], next(order), worker, request))

    def place(placed: list[tuple[int, int]]) -> None:
        for request, worker in placed:
            if busy[worker] < slots:
                start(worker, request)
            else:
                queued[worker].append(request)

    def timed(call, *arguments) -> list[tuple[int, int]]:
        nonlocal spent
        began = time.perf_counter()
        placed = call(*arguments)
        spent += time.perf_counter() - began
        return placed

    for group in first or range(groups):
        place(timed(router.submit, group, lengths[group], group))
    ended = 0
    while events:
        now, _, worker, request = heapq.heappop(events)
        ended += 1
        busy[worker] -= 1
        if queued[worker]:
            start(worker, queued[worker].popleft())
        place(timed(router.done, request, worker))
        if (following := request + groups) < groups * turns:
            place(timed(router.submit, following, lengths[following], request % groups))
    assert ended == groups * turns, "a request never ended"
    return now, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    peer = find_spec("verl") is not None
    workers, slots = given.workers, given.slots
    even = [1.0] * workers
    scenarios = {"equal": (even, 1), "one slow": ([1 / 3, *even[1:]], 1), "four turns": (even, 4)}
    rows, data, missed = [], [], []
    for number in given.requests:
        lengths = longtail.responses(number)
        mean = max(1, sum(lengths) // number)
        for scenario, (speeds, turns) in scenarios.items():
            chains = [sum(lengths[group :: number // turns]) for group in range(number // turns)]
            bound = max(sum(lengths) / (sum(speeds) * slots), max(chains))
            routers = {"verl": lambda: Verls(workers)} if peer else {}
            most, slack = slots + slots // 4, mean * slots // 4
            costs = {"unknown": lambda _, mean=mean: mean, "known": lambda length: length}
            for word, cost in costs.items():
                routers[f"ours, lengths {word}"] = functools.partial(Ours, workers, most, slack, cost)
            found = {}
            for name, make in routers.items():
                longest_first = sorted(range(len(chains)), key=chains.__getitem__, reverse=True)
                order = longest_first if name.endswith(" known") else None
                makespan, spent = simulate(make(), lengths, speeds, slots, turns, order)
                found[name] = makespan
                over = makespan / bound
                data.append({"requests": number, "scenario": scenario, "router": name, "over bound": over})
                peers = f"{makespan / found['verl']:.2f}" if peer else "-"
                us = spent / number * 1e6
                rows.append([str(number), scenario, name, f"{makespan / bound:.2f}", peers, f"{us:.1f}"])
                if name != "verl" and scenario == "equal" and makespan / bound > AIM:
                    missed.append(f"{name}, {number} requests: {makespan / bound:.2f}")
    columns = ["requests", "workers", "router", "makespan / bound", "/ verl", "us per request"]
    title = (
        f"{workers} workers of {slots} slots; aim: within {AIM - 1:.0%} of the bound where workers are equal"
    )
    emit({"aim": AIM, "results": data, "missed": missed}, [Table(title, columns, rows)], given.json)
    if not given.json:
        print(f"{len(missed)} aims missed", *missed, sep="\n")


if __name__ == "__main__":
    main()
