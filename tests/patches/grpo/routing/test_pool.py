"""The pool of servers: least loaded first, thresholds, prefixes that stay together."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashpatch.patches.grpo.routing.pool import Pool


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model of it: loads add up, the emptiest eligible worker is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(most=3)
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

    @rule(tokens=st.integers(1, 70))
    def acquire(self, tokens):
        loads = {name: sum(held.values()) for name, held in self.model.items() if name not in self.resting}
        fits = {name: load for name, load in loads.items() if len(self.model[name]) < 3}
        got = self.pool.acquire(self.next, tokens)
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
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_prefixes_stay_together_until_the_worker_is_full():
    pool = Pool(most=3)
    for name in "ab":
        pool.add(name)
    home = pool.acquire(0, 20, prefix="p")
    assert pool.acquire(1, 5, prefix="p") == home
    pool.acquire(2, 1)  # the other worker is the emptiest now
    assert pool.acquire(3, 5, prefix="p") == home
    other = pool.acquire(4, 5, prefix="p")
    assert other != home and pool.acquire(5, 5, prefix="p") == other
    assert pool.forget_prefixes() == 1
