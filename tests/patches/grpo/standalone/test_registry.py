"""The registry: least loaded first, thresholds, and every request ends exactly once whatever workers do."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

import grpo_fleet
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machine import limit

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.routing.pool import Pool
from flashpatch.patches.grpo.standalone.registry import Registry, RequestLost, WorkerLost


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model of it: loads add up, the emptiest eligible worker is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(cap=50, affinity=False)
        self.model: dict[str, dict[int, int]] = {}
        self.resting: set[str] = set()
        self.next = 0

    @rule(name=st.sampled_from("abcd"))
    def add(self, name):
        assert sorted(self.pool.add(name)) == sorted(self.model.get(name, {}))
        self.model[name] = {}
        self.resting.discard(name)

    @rule(name=st.sampled_from("abcd"))
    def remove(self, name):
        assert sorted(self.pool.remove(name)) == sorted(self.model.pop(name, {}))
        self.resting.discard(name)

    @rule(name=st.sampled_from("abcd"), rest=st.booleans())
    def rest(self, name, rest):
        (self.pool.suspend if rest else self.pool.resume)(name)
        if rest and name in self.model:
            self.resting.add(name)
        elif not rest:
            self.resting.discard(name)

    @rule(tokens=st.integers(1, 70), avoid=st.sets(st.sampled_from("abcd"), max_size=2))
    def acquire(self, tokens, avoid):
        loads = {
            name: sum(held.values()) for name, held in self.model.items() if name not in self.resting | avoid
        }
        fits = {name: load for name, load in loads.items() if not load or load + tokens <= 50}
        got = self.pool.acquire(self.next, tokens, avoid=avoid)
        if not fits:
            assert got is None
        else:
            assert fits[got] == min(fits.values())
            self.model[got][self.next] = tokens
            self.next += 1

    @rule(data=st.data())
    def release(self, data):
        if self.next:
            request = data.draw(st.integers(0, self.next - 1))
            held = [name for name, requests in self.model.items() if request in requests]
            assert self.pool.release(request) == bool(held)
            for name in held:
                del self.model[name][request]

    @invariant()
    def loads_add_up(self):
        assert self.pool.loads() == {name: sum(held.values()) for name, held in self.model.items()}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_prefixes_stay_together_until_the_worker_is_too_full():
    pool = Pool(cap=100, slack=30)
    for name in "ab":
        pool.add(name)
    home = pool.acquire(0, 20, prefix="p")
    assert pool.acquire(1, 5, prefix="p") == home
    assert pool.acquire(2, 5, prefix="p") == home
    pool.acquire(3, 1)  # the other worker is the emptiest now
    assert pool.acquire(4, 5, prefix="p") == home, "30 tokens fuller is within the slack"
    other = pool.acquire(5, 5, prefix="p")
    assert other != home and pool.acquire(6, 5, prefix="p") == other
    assert pool.forget_prefixes() == 1 and Pool(affinity=False).forget_prefixes() == 0


def test_a_request_over_the_threshold_goes_to_an_idle_worker():
    pool = Pool(cap=10)
    pool.add("a")
    assert pool.acquire(0, 25) == "a" and pool.acquire(1, 1) is None
    pool.release(0)
    assert pool.acquire(1, 1) == "a" and pool.acquire(2, 25) is None


def test_a_threshold_in_requests():
    pool = Pool(most=2)
    pool.add("a")
    assert [pool.acquire(number, 1) for number in range(3)] == ["a", "a", None]
    pool.release(0)
    assert pool.acquire(3, 10_000) == "a"


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, limit(120)))


def test_back_pressure_in_order_and_registration_at_run_time():
    async def scenario():
        served, gate = [], asyncio.Semaphore(0)

        async def send(handle, payload):
            served.append(payload)
            await gate.acquire()
            return handle, payload

        registry = Registry(send, cap=10)
        early = [asyncio.create_task(registry.submit(number, 10)) for number in range(4)]
        await asyncio.sleep(0)
        assert served == [] and registry.status()["waiting"] == 4
        await registry.register("a", "A")
        await grpo_fleet.settled()
        assert served == [0] and registry.status()["loads"] == {"a": 10}
        await registry.register("b", "B")
        await grpo_fleet.settled()
        assert served == [0, 1]
        for _ in range(4):
            gate.release()
        assert [payload for _, payload in await asyncio.gather(*early)] == [0, 1, 2, 3]
        assert registry.status()["counts"] == {"submitted": 4, "resubmitted": 0, "ended": 4}
        assert registry.status()["loads"] == {"a": 0, "b": 0}

    run(scenario())


def test_a_request_is_resubmitted_exactly_once():
    async def scenario():
        seen: list[tuple[str, int]] = []

        async def send(handle, payload):
            seen.append((handle, payload))
            raise WorkerLost("died")

        registry = Registry(send, queue_timeout=1)
        for name in "abc":
            await registry.register(name, name)
        with pytest.raises(RequestLost, match="a was lost: died; b was lost: died"):
            await registry.submit(7, 1)
        assert seen == [("a", 7), ("b", 7)] and list(registry.pool.workers) == ["c"]
        with pytest.raises(RequestLost, match="none took it within 1 s"):
            await registry.submit(8, 1)
        assert seen[2:] == [("c", 8)]

    run(scenario())


def test_an_error_of_the_request_is_its_answer():
    async def scenario():
        async def send(handle, payload):
            raise ValueError("too long")

        registry = Registry(send)
        await registry.register("a", None)
        with pytest.raises(ValueError, match="too long"):
            await registry.submit(1, 1)
        assert registry.status()["counts"]["resubmitted"] == 0 and registry.status()["loads"] == {"a": 0}

    run(scenario())


def test_a_cancelled_request_leaves_nothing_behind():
    async def scenario():
        async def send(handle, payload):
            await asyncio.sleep(60)

        registry = Registry(send, cap=1)
        await registry.register("a", None)
        tasks = [asyncio.create_task(registry.submit(number, 1)) for number in range(3)]
        await grpo_fleet.settled()
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert registry.status()["loads"] == {"a": 0} and registry.status()["waiting"] == 0

    run(scenario())


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: Pool(cap=-1), "cap, most, slack, remembered"),
        (lambda: Pool().acquire(1, 0), "tokens] is 0"),
        (lambda: Registry(None, timeout=0), "timeout"),
    ],
)
def test_bad_input_is_refused_by_name(make, named):
    with pytest.raises(PatchError) as error:
        make()
    assert named in str(error.value) and error.value.patch == "grpo.registry"


def test_a_request_cannot_be_under_way_twice():
    pool = Pool()
    pool.add("a")
    pool.acquire("r", 1)
    with pytest.raises(PatchError, match="'r' is outstanding already"):
        pool.acquire("r", 1)


async def chaos(folder, requests: int, workers: int, seconds: float, harm: float) -> tuple[Counter, Counter]:
    """Send requests while workers are killed, stopped, restarted; how they ended, and what happened."""
    draw = random.Random(5)
    registry = Registry(
        grpo_fleet.send, cap=40, timeout=1.5, rest=0.3, ping=grpo_fleet.ping, heartbeat=0.2, grace=0.4
    )
    each_happened = asyncio.Event()
    ends: dict[int, list[str]] = {number: [] for number in range(requests)}
    async with grpo_fleet.Fleet(folder, registry) as fleet:
        for number in range(workers):
            fleet.start(f"w{number}")
        await fleet.ready(workers)

        async def one(number: int) -> None:
            # Long-tailed work; some requests are at fault themselves.
            work = min(draw.lognormvariate(-6.5, 1.2), 0.3)
            try:
                answer = await registry.submit({"work": work, "boom": number % 97 == 0}, 1 + int(work * 1000))
                ends[number].append("result" if answer["by"] in fleet.processes else "stranger")
            except ValueError:
                ends[number].append("its own error")
            except RequestLost:
                ends[number].append("lost its workers")

        async def harm_one(kind: str, stopped: float) -> None:
            # One worker is left alone: somebody must be able to answer.
            name = draw.choice(list(fleet.processes)[1:])
            fleet.counts[kind] += 1
            if kind == "hang":
                fleet.signal(name, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(stopped, lambda: fleet.signal(name, signal.SIGCONT))
            else:
                for _ in range(3 if kind == "flap" else 1):
                    fleet.kill(name)
                    fleet.start(name)
                    await asyncio.sleep(0.05 if kind == "flap" else 0)

        async def harming() -> None:
            # Each kind once, whatever is drawn later; nothing else happens until the stop has been noticed.
            name = draw.choice(list(fleet.processes)[1:])
            fleet.counts["hang"] += 1
            fleet.signal(name, signal.SIGSTOP)
            while not registry.counts["hung workers"]:
                await asyncio.sleep(0.01)
            fleet.signal(name, signal.SIGCONT)
            await harm_one("flap", 0)
            while not (registry.counts["lost workers"] and registry.counts["resubmitted"]):
                await harm_one("kill", 0)
                await asyncio.sleep(0.1)
            await harm_one("kill", 0)
            each_happened.set()
            while True:
                await asyncio.sleep(draw.expovariate(harm))
                await harm_one(draw.choice(("kill", "hang", "flap")), draw.uniform(0.1, 1.5))

        async def feed() -> None:
            pace = seconds / requests
            loop = asyncio.get_running_loop()
            began, tasks = loop.time(), []
            for number in range(requests):
                tasks.append(asyncio.create_task(one(number)))
                if number >= requests // 2 and not each_happened.is_set():  # on a slow machine
                    await asyncio.sleep(0.02)
                elif (ahead := began + number * pace - loop.time()) > 0.005:
                    await asyncio.sleep(ahead)
            await asyncio.gather(*tasks)

        villain = asyncio.create_task(harming())
        await feed()
        villain.cancel()
        status = registry.status()
    assert all(len(end) == 1 for end in ends.values()), "every request ends exactly once"
    assert status["counts"]["submitted"] == status["counts"]["ended"] == requests and status["waiting"] == 0
    assert set(status["loads"].values()) == {0}
    happened = fleet.counts + Counter(status["counts"])
    return Counter(end for (end,) in ends.values()), happened


def weigh(ends: Counter, happened: Counter, requests: int) -> None:
    print(dict(ends), dict(happened))
    own = len(range(0, requests, 97))
    # A request at fault may also lose its workers; everything else has its result unless it lost two workers.
    assert (
        ends["stranger"] == 0
        and ends["result"] + ends["its own error"] + ends["lost its workers"] == requests
    )
    assert ends["its own error"] <= own and ends["lost its workers"] < requests / 100
    for kind in ("kill", "hang", "flap", "resubmitted", "lost workers", "hung workers"):
        assert happened[kind], f"the test did not bring about: {kind}"


@pytest.mark.slow
def test_chaos_with_ten_thousand_requests(tmp_path):
    ends, happened = asyncio.run(asyncio.wait_for(chaos(tmp_path, 10_000, 6, 12, 3.0), limit(200)))
    weigh(ends, happened, 10_000)


@pytest.mark.full
def test_chaos_with_a_hundred_thousand_requests(tmp_path):
    ends, happened = asyncio.run(asyncio.wait_for(chaos(tmp_path, 100_000, 12, 150, 3.0), 1200))
    weigh(ends, happened, 100_000)
