"""The order of waiting requests: one of each unknown prompt, then the longest predicted; nothing is forgotten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashpatch.patches.grpo.routing.lengths import Lengths
from flashpatch.patches.grpo.routing.order import Arrival, LongestFirst


def emptied(order) -> list:
    found = []
    while (one := order.first()) is not None:
        order.drop()
        found.append(one)
    return found


def test_first_come_first_served():
    order = Arrival()
    for wait in "abc":
        order.push(wait)
    assert list(order) == emptied(order) == ["a", "b", "c"]


def test_one_of_each_new_prompt_and_then_the_longest():
    now = 0.0
    lengths = Lengths(100)
    for _ in range(40):
        lengths.ended("short", 300, seconds=300.0)
        lengths.ended("long", 1000, seconds=1000.0)
    order = LongestFirst(lengths, lambda: now)
    for wait in ("short 1", "long 1", "new 1", "new 2", "newer 1", "newer 2"):
        order.push(wait, wait.split()[0])
    for wait in ("new 1", "newer 1"):
        assert order.first() == wait
        order.drop()
        lengths.started(wait.split()[0], now)
    assert order.first() == "long 1", "what is not known yet is expected to be as most are"
    now = 5000.0
    assert order.first() == "new 2", "its sibling still runs"
    lengths.stopped("new", 0.0)
    lengths.ended("new", 1, seconds=5000.0)
    order.changed("new")
    assert emptied(order)[-2:] == ["short 1", "new 2"] and order.first() is None


class OrderMachine(RuleBasedStateMachine):
    """Whatever is predicted, each request comes exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.lengths = Lengths(10, remembered=4)
        self.order: LongestFirst[tuple[str, int]] = LongestFirst(self.lengths, lambda: self.now)
        self.waiting: set[tuple[str, int]] = set()
        self.running: list[tuple[str, float]] = []

    @rule(prompt=st.sampled_from("abcdef"))
    def push(self, prompt):
        self.number += 1
        self.waiting.add((prompt, self.number))
        self.order.push((prompt, self.number), prompt)

    @precondition(lambda self: self.waiting)
    @rule(starts=st.booleans())
    def take(self, starts):
        one = self.order.first()
        assert one == self.order.first() and one in self.waiting
        self.order.drop()
        self.waiting.remove(one)
        assert not any(other < one for other in self.waiting if other[0] == one[0]), "siblings as they came"
        if starts:
            self.lengths.started(one[0], self.now)
            self.running.append((one[0], self.now))

    @precondition(lambda self: self.running)
    @rule(tokens=st.integers(1, 1000), complete=st.booleans(), at=st.integers(0, 100))
    def end(self, tokens, complete, at):
        prompt, began = self.running.pop(at % len(self.running))
        self.lengths.stopped(prompt, began)
        if complete:
            self.lengths.ended(prompt, tokens, self.now - began)
            self.order.changed(prompt)

    @rule(seconds=st.floats(0, 1e4))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def nothing_is_forgotten(self):
        assert set(self.order) == self.waiting
        assert (self.order.first() is None) == (not self.waiting)

    def teardown(self):
        assert set(emptied(self.order)) == self.waiting


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40)
