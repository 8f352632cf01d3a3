"""How routing, packing, the ledger and the report grow."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import job_page
import longtail
import router

from flashpatch import registry
from flashpatch.ledger import runs
from flashpatch.patches.grpo.routing.pool import Pool
from flashpatch.patches.grpo.streaming.packing import Packer
from flashpatch.verify import live
from flashpatch.verify.job import collect, page, source

Timed = Callable[[], object]
BUDGET = 16_384 + 400
KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _routed(workers: int, requests: int) -> Timed:
    """Place requests on workers of 32 slots and let the oldest end, until all have: prediction and order as in a job."""
    from router_traces import Request

    lengths = longtail.responses(requests)
    trace = [
        Request(prompt=number // 16, tokens=200, turns=(length,)) for number, length in enumerate(lengths)
    ]

    def route() -> None:
        balancer = router.Ours(workers, 32, 1000, "predicted")
        running: list[tuple[int, int]] = []
        for number, one in enumerate(trace):
            running += balancer.submit(number, 0, one, float(number))
        for at in range(requests):
            number, worker = running[at]
            running += balancer.done(number, 0, trace[number], float(requests + at), worker)

    return route


def balancer_by_workers(workers: int) -> Timed:
    """8,192 requests on so many workers."""
    return _routed(workers, 8192)


def balancer_by_requests(requests: int) -> Timed:
    """So many requests on 1,024 workers."""
    return _routed(1024, requests)


def balancer_full(workers: int) -> Timed:
    """1,000 requests that find all workers at their threshold of tokens."""
    pool = Pool(cap=100)
    for worker in range(workers):
        pool.add(str(worker))
        pool.acquire(("held", worker), 90)
    return lambda: [pool.acquire(number, 50) for number in range(1000)]


def _packed(ranks: int, samples: int) -> Timed:
    tokens = [a + b for a, b in zip(longtail.responses(samples), longtail.prompts(samples), strict=True)]

    def pack() -> None:
        packer = Packer(ranks, BUDGET)
        for number, one in enumerate(tokens):
            for _ in packer.add(number, one):
                pass
        packer.flush()

    return pack


def packer_by_ranks(ranks: int) -> Timed:
    """16,384 samples packed for so many ranks."""
    return _packed(ranks, 16_384)


def packer_by_samples(samples: int) -> Timed:
    """So many samples packed for 1,024 ranks."""
    return _packed(1024, samples)


def _run(processes: int) -> Path:
    KEPT.append(tempfile.TemporaryDirectory(prefix="flashpatch-growth-"))
    return job_page.write_run(Path(KEPT[-1].name, "made-up"), processes, 10 * processes)


def ledger(processes: int) -> Timed:
    """Read the rows of so many processes and judge them, as ``flashpatch-verify --live`` does."""
    folder, patches = _run(processes), registry.patches()

    def judge() -> None:
        run = runs.read_run(folder)
        assert run is not None and len(run.rows) == processes
        live.judge(run, patches)

    return judge


def report(processes: int) -> Timed:
    """Read rows and ten updates of each of so many processes and write the page, as ``flashpatch report`` does."""
    folder, patches = _run(processes), registry.patches()
    return lambda: page.render(collect.job(source.load(folder), patches))


PARTS: dict[str, tuple[str, Callable[[int], Timed], float]] = {
    "balancer": ("workers", balancer_by_workers, 0),
    "balancer, requests": ("requests", balancer_by_requests, 1),
    "balancer, all full": ("workers", balancer_full, 0),
    "packer": ("ranks", packer_by_ranks, 0),
    "packer, samples": ("samples", packer_by_samples, 1),
    "ledger": ("processes", ledger, 1),
    "report": ("processes", report, 1),
}
"""Part -> what grows, its timing at a size, and the exponent of its work."""
random.seed(0)
