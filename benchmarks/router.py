"""Routing against verl's balancer and the offline optimum: makespan of long-tailed requests, and cost of a
decision.

    python benchmarks/router.py [--workers 16] [--slots 32] [--requests 4096] [--recorded TRACE] [--json]

A simulation in virtual time; the routers are the real classes. A worker decodes up to ``slots`` requests at
once, each at the same speed, and queues the rest first come first served, as an engine does. Traces are in
`router_traces.py`. The bound is what no schedule can beat: all work spread evenly, or the longest conversation
alone. Routers:

    verl                     GlobalRequestLoadBalancer: fewest requests, everything is handed out at once
    ours, lengths unknown    fewest outstanding tokens where every response is expected to have the mean length,
                             first come first served
    ours, lengths predicted  from responses to the same prompt that ended or still run, longest first
    ours, lengths known      the same with each request's own length, submitted longest first

Ours have a threshold of 17/16 of the slots, so that what waits goes where there is room. Scenarios: all workers
equal; one worker at a third of the speed; conversations of four turns. Columns: ``us``: processor microseconds per
decision, of which a request needs two (it comes, it ends); ``shared``: requests that went to a worker which had had
their prompt. Aim: makespan within 10% of the bound with predicted lengths and equal workers, decisions under 20 us."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter, deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import quick
import router_traces
from router_traces import Request, Trace

from flashpatch.commands.report import Table, emit
from flashpatch.patches.grpo.routing.lengths import Lengths
from flashpatch.patches.grpo.routing.order import Arrival, LongestFirst
from flashpatch.patches.grpo.routing.pool import Pool, threshold

AIM, AIM_US = 1.10, 20.0
RECORDED = Path(__file__).parent / "lengths" / "verl.jsonl.gz"
Placed = list[tuple[int, int]]
"""Requests and the workers they go to."""


class Ours:
    """The parts of `TokenBalancer`, with a virtual clock."""

    def __init__(self, workers: int, slots: int, mean: int, lengths: str) -> None:
        self.kind, self.mean, self.now = lengths, mean, 0.0
        self.pool = Pool(threshold(slots))
        self.lengths = Lengths(mean)
        predicted = lengths == "predicted"
        self.order: Any = LongestFirst(self.lengths, lambda: self.now) if predicted else Arrival()
        self.began: dict[int, float] = {}
        for worker in range(workers):
            self.pool.add(str(worker))

    def submit(self, number: int, turn: int, one: Request, now: float) -> Placed:
        self.now = now
        self.order.push((number, turn, one), (one.prompt, turn))
        return self._serve()

    def done(self, number: int, turn: int, one: Request, now: float, worker: int) -> Placed:
        self.now = now
        self.pool.release(number)
        if self.kind == "predicted":
            key, began = (one.prompt, turn), self.began.pop(number)
            self.lengths.stopped(key, began)
            self.lengths.ended(key, one.turns[turn], now - began)
            self.order.changed(key)
        return self._serve()

    def _serve(self) -> Placed:
        placed = []
        while (first := self.order.first()) is not None:
            number, turn, one = first
            expected = {"unknown": self.mean, "known": one.turns[turn]}.get(self.kind)
            if expected is None:
                expected = max(1, int(self.lengths.expect((one.prompt, turn), self.now)))
            name = self.pool.acquire(
                number, one.tokens + expected, number, shared=one.prompt, saving=one.tokens
            )
            if name is None:
                break
            self.order.drop()
            self.lengths.started((one.prompt, turn), self.now)
            self.began[number] = self.now
            placed.append((number, int(name)))
        return placed


class Verls:
    """verl's own balancer."""

    def __init__(self, workers: int) -> None:
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        self.balancer = GlobalRequestLoadBalancer({str(worker): None for worker in range(workers)})

    def submit(self, number: int, turn: int, one: Request, now: float) -> Placed:
        return [(number, int(self.balancer.acquire_server(str(number))[0]))]

    def done(self, number: int, turn: int, one: Request, now: float, worker: int) -> Placed:
        self.balancer.release_server(str(worker))
        return []


def simulate(
    router: Any, trace: Trace, speeds: list[float], slots: int, start: float = 0.0
) -> tuple[float, float, float]:
    """Makespan in decoding steps, processor microseconds per decision, share of requests with a shared prompt."""
    events: list[tuple[float, int, int, int]] = []
    order = itertools.count()
    busy, queued = [0] * len(speeds), [deque() for _ in speeds]
    turns, had = Counter(), [set() for _ in speeds]
    now, spent, shared, decisions = start, 0.0, 0, 0

    def begin(worker: int, number: int) -> None:
        busy[worker] += 1
        length = trace[number].turns[turns[number]]
        heapq.heappush(events, (now + length / speeds[worker], next(order), worker, number))

    def decide(call: Any, number: int, *arguments: Any) -> None:
        nonlocal spent, shared, decisions
        began = time.process_time()
        placed = call(number, turns[number], trace[number], now, *arguments)
        spent += time.process_time() - began
        decisions += 1
        for placed_number, worker in placed:
            prompt = trace[placed_number].prompt
            shared += prompt in had[worker]
            had[worker].add(prompt)
            if busy[worker] < slots:
                begin(worker, placed_number)
            else:
                queued[worker].append(placed_number)

    for number in range(len(trace)):
        decide(router.submit, number)
    while events:
        now, _, worker, number = heapq.heappop(events)
        busy[worker] -= 1
        if queued[worker]:
            begin(worker, queued[worker].popleft())
        decide(router.done, number, worker)
        turns[number] += 1
        if turns[number] < len(trace[number].turns):
            decide(router.submit, number)
    assert all(turns[number] == len(one.turns) for number, one in enumerate(trace)), "a request never ended"
    return now - start, spent / decisions * 1e6, shared / sum(turns.values())


def compare(
    steps: list[Trace], speeds: list[float], slots: int, peer: bool
) -> dict[str, tuple[float, float, float]]:
    """Each router's makespan over the bound, cost of a decision and share of shared prompts, in the last of the
    steps."""
    lengths = [sum(one.turns) for one in steps[-1]]
    bound = max(sum(lengths) / (sum(speeds) * slots), max(lengths))
    mean = max(1, sum(lengths) // sum(len(one.turns) for one in steps[-1]))
    routers: dict[str, Any] = {"verl": Verls(len(speeds))} if peer else {}
    for kind in ("unknown", "predicted", "known"):
        routers[f"ours, lengths {kind}"] = Ours(len(speeds), slots, mean, kind)
    found = {}
    for name, router in routers.items():
        start = 0.0
        for trace in steps:
            if name.endswith(" known"):
                trace = sorted(trace, key=lambda one: -sum(one.turns))
            makespan, us, shared = simulate(router, trace, speeds, slots, start)
            start += makespan
        found[name] = makespan / bound, us, shared
    return found


def main() -> None:
    parser = quick.parser(__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="what a job did, see `router_traces`")
    parser.add_argument("--json", action="store_true")
    given = quick.parse(parser, workers=4, slots=4, requests=[256])
    logging.disable(logging.WARNING)
    peer = find_spec("verl") is not None
    even = [1.0] * given.workers
    slow = [1 / 3, *even[1:]]
    scenarios = []
    for number in given.requests:
        independent, groups = router_traces.independent(number), router_traces.groups(number)
        later = router_traces.groups(number, 1, 1.1)
        scenarios += [
            (number, "independent", "equal", [independent], even, given.slots),
            (number, "groups", "equal", [groups], even, given.slots),
            (number, "groups, 2nd epoch", "equal", [groups, later], even, given.slots),
            (number, "groups", "one slow", [groups], slow, given.slots),
            (number, "independent", "four turns", [router_traces.independent(number, 4)], even, given.slots),
        ]
    steps = router_traces.recorded(given.recorded) if given.recorded.exists() else []
    few = min(map(len, steps), default=0)
    for count in (1, len(steps)) if steps else ():
        # Two workers, and an eighth of a step's requests at once.
        place = (f"recorded, step {count}", "equal", steps[:count], [1.0, 1.0], max(1, few // 16))
        scenarios.append((len(steps[count - 1]), *place))
    rows, data, missed = [], [], []
    for number, trace, workers, each, speeds, slots in scenarios:
        for name, (over, us, shared) in compare(each, speeds, slots, peer).items():
            one = {"requests": number, "trace": trace, "workers": workers, "router": name}
            data.append(one | {"over bound": over, "us": us, "shared": shared})
            rows.append([str(number), trace, workers, name, f"{over:.2f}", f"{us:.1f}", f"{shared:.0%}"])
            if name.endswith("predicted") and ((workers == "equal" and over > AIM) or us > AIM_US):
                missed.append(f"{number} requests, {trace}, {workers}: {over:.2f}, {us:.1f} us")
    columns = ["requests", "trace", "workers", "router", "makespan / bound", "us", "shared"]
    title = (
        f"{given.workers} workers of {given.slots} slots; aim: predicted within {AIM - 1:.0%} of the bound where "
        f"workers are equal, {AIM_US:.0f} us"
    )
    emit({"aim": AIM, "results": data, "missed": missed}, [Table(title, columns, rows)], given.json)
    if not given.json:
        print(f"{len(missed)} aims missed", *missed, sep="\n")


if __name__ == "__main__":
    main()
