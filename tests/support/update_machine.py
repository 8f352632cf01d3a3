"""Any sequence of senders, faults, sleeps and requests: toys under the core do what the specification says.

Two rules. Nothing is ever ready that was not sent whole: what answers is compared with what senders sent, apart from the
specification too. Nothing that was sent whole, without doubt, is refused. A failure prints the shortest sequence found.

A sender without a name keeps its contract: it is one sender, which begins with the same tensor, from its beginning at
first, and stops at its first error. What only breaks that contract is not tried."""

import dataclasses
import itertools
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from update_spec import ANSWERED, SPOILED
from update_toys import BUFFERS, EMBEDDING, HEAD, METHODS, NAMES, Options, Toy


@dataclasses.dataclass
class Sender:
    """Who sends a policy: ``door``: "session", "end", "calls", "one call"."""

    door: str
    left: list  # calls, each of (name, number), that it has still to send
    policy: dict  # name -> number, as its engine should have it
    done: list = dataclasses.field(default_factory=list)


orders, numbers = st.integers(0, 99), st.integers(0, 7)
some = st.booleans()
STEPS = ("call",) * 6 + ("request", "again", "other")
DOORS = ("session", "end", "calls", "calls", "one call")


class Updates(RuleBasedStateMachine):
    """One engine and its senders."""

    ranks = 1
    operations = 0

    @initialize(
        atomic=st.sampled_from(["layer", "model"]),
        method=st.sampled_from(METHODS),
        ties=st.sampled_from(["", "", "made", "found"]),
        dummy=st.sampled_from([False, False, True]),
        first=numbers,
    )
    def open_engine(self, atomic, method, ties, dummy, first):
        ties = "" if dummy and ties == "found" else ties
        self.toy = self.opened(Options(atomic, method, ties, dummy, self.ranks))
        ties, dummy = self.toy.options.ties, self.toy.options.dummy
        self.first = NAMES[0 if ties == "made" else first]  # where a sender that names nothing begins
        self.number = 0
        self.sender = self.waiting = None
        self.last = None  # who sent what was committed last
        self.whole = [{} if dummy else dict.fromkeys(NAMES, 0)]  # policies that were sent whole

    def opened(self, options):
        return Toy(options)

    # -- senders -------------------------------------------------------------------------------------------

    @rule(
        door=st.sampled_from(DOORS),
        order=orders,
        cuts=st.integers(1, 5),
        frozen=st.sampled_from([0, 0, 1, 3]),
        script=st.lists(st.sampled_from(STEPS), max_size=12),
    )
    def new_sender(self, door, order, cuts, frozen, script):
        """The one before it may have died; ``script``: what this one does next."""
        spec = self.toy.spec
        if door in ("calls", "end") and spec.open == "unnamed" and not self.begins_anew(door):
            return
        self.waiting = None
        self.start(door, order, cuts, frozen)
        for step, back in zip(script, itertools.cycle((0, 2, 1))):
            if step == "request":
                self.request()
            elif step == "call" and self.sender is not None and self.sender.left:
                self.next_call_plain()
            elif step in ("again", "other"):
                self.repeat_call(back, step == "other", False)

    def begins_anew(self, door):
        """Names can tell what it sends from what is open."""
        return door == "calls" and (self.toy.spec.anchor or next(iter(self.toy.spec.came))) == self.first

    def start(self, door, order, cuts, frozen):
        rng = random.Random(order)
        self.number += 1
        names = list(NAMES)
        if self.toy.tied:
            either = [HEAD, EMBEDDING] if self.toy.options.ties == "found" else [HEAD]
            names.remove(rng.choice([name for name in either if name != self.first]))
        if self.toy.options.dummy and door in ("session", "end") and rng.random() < 0.3:
            names = [name for name in names if name not in BUFFERS or name in self.toy.spec.needed]
        rng.shuffle(names)
        if door == "calls":
            names.sort(key=lambda name: name != self.first)
        kept = {
            name
            for name in (*names[: frozen % 2], *rng.sample(names, frozen))
            if self.served(name) is not None
        }
        items = [(name, self.served(name) if name in kept else self.number) for name in names]
        cuts = len(items) if door == "one call" else min(cuts, len(items) - 1)
        calls = [items[start : start + cuts] for start in range(0, len(items), cuts)]
        self.sender = Sender(door, calls, self.told(items))
        self.whole.append(self.sender.policy)
        if door == "session":
            self.toy.begin()
            self.stops()

    def served(self, name):
        return self.toy.spec.served.get(self.toy.spec.owner[name])

    def told(self, items):
        """What an engine should have, by all names of each tensor."""
        owner = self.toy.spec.owner
        brought = {owner[name]: number for name, number in items}
        return {name: brought[owner[name]] for name in NAMES if owner[name] in brought}

    def stops(self):
        """A sender stops at its first error."""
        if self.toy.raised:
            self.sender = None

    def send(self, items, fault="", asked=()):
        if self.sender is not None and self.sender.door == "session":
            self.sender.policy.update(self.told(items))
        self.toy.load(items, fault, asked)
        self.check()
        self.stops()

    @rule(
        fault=st.sampled_from([""] * 9 + ["raises", "shape", "unknown", "spoiled"]),
        asked=st.sets(st.integers(0, 4)),
        caught=some,
    )
    def next_call(self, fault, asked, caught):
        """``caught``: a sender catches its error, and goes to its end."""
        sender = self.sender
        if sender is None or not sender.left:
            return
        items = sender.left.pop(0)
        sender.done.append(items)
        if fault == "spoiled":
            items, fault = [(items[0][0], SPOILED), *items[1:]], ""
            self.sender.policy = dict(sender.policy)
        self.send(items, fault, asked)
        if caught and self.toy.raised:
            self.toy.finish()
            self.check()
        self.ends()

    @rule(asked=orders)
    def all_other_calls(self, asked):
        """The rest of what a sender has, requests between its calls, and calls that come again."""
        rng = random.Random(asked)
        while self.sender is not None and self.sender.left:
            self.next_call_plain()
            if rng.random() < 0.3:
                self.repeat_call(rng.randrange(9), rng.random() < 0.5, False)
            if rng.random() < 0.3:
                self.request()

    def next_call_plain(self):
        items = self.sender.left.pop(0)
        self.sender.done.append(items)
        self.send(items)
        self.ends()

    def ends(self):
        """A sender that has sent everything."""
        sender = self.sender
        if sender is None or sender.left:
            return
        if sender.door == "session" and self.toy.spec.open != "named":
            return
        if sender.door in ("session", "end"):
            self.toy.finish()
            self.check()
        self.last = None if self.toy.raised else sender
        self.sender, self.waiting = self.waiting, None

    @rule(back=st.integers(0, 3), other=some, more=some)
    def repeat(self, back, other, more):
        """A call comes again; ``other``: with other values; ``more``: and the next one with it."""
        self.repeat_call(back, other, more)

    def repeat_call(self, back, other, more):
        sender = self.sender
        if sender is None or not sender.done or (other and sender.door == "end"):
            return
        items = sender.done[-1 - back % len(sender.done)]
        if other:
            if sender.door != "session" and self.first in dict(items):
                return  # that is another sender's beginning
            self.number += 1
            items = [(name, self.number) for name, _ in items]
        if more and sender.left and not other:
            items = [*items, *sender.left.pop(0)]
            sender.done.append(items)
        self.send(items)
        self.ends()

    @rule(place=numbers)
    def late_repeat(self, place):
        """A call of the last sync comes again after its commit."""
        if (
            self.sender is None
            and self.last is not None
            and self.toy.spec.open is None
            and self.toy.spec.anchor
        ):
            self.send(self.last.done[place % len(self.last.done)])
            if self.toy.spec.open:
                self.sender = dataclasses.replace(self.last, left=[], done=self.last.done[:1])

    @rule(order=orders, size=st.integers(1, 7))
    def stray(self, order, size):
        """A sender that begins anywhere; names tell where there is an anchor."""
        spec = self.toy.spec
        if spec.open is not None or spec.anchor is None:
            return
        self.number += 1
        names = random.Random(order).sample(NAMES[: 7 if self.toy.tied else 8], size)
        if names[0] != spec.anchor:
            self.sender = None
            items = [(name, self.number) for name in names]
            if len(self.told(items)) == len(NAMES):  # of a tied model: everything in one call
                self.whole.append(self.told(items))
            self.send(items)

    @rule(door=st.sampled_from(["session", "one call"]), order=orders, cuts=st.integers(1, 8))
    def another_sender_between(self, door, order, cuts):
        """Somebody else sends a whole policy, then the sender goes on."""
        sender = self.sender
        if sender is not None and (sender.door != "calls" or not self.toy.spec.anchor):
            sender = None
        if sender is not None and not sender.done:
            sender = None
        self.sender = self.waiting = None
        self.start(door, order, cuts, 0)
        while self.sender is not None and self.sender.left:
            self.next_call_plain()
        self.sender = sender
        if sender is not None and sender.left:
            self.next_call_plain()

    # -- ends and requests ---------------------------------------------------------------------------------

    @rule()
    def request(self):
        self.toy.request()
        self.check()

    @rule(partial=some)
    def end(self, partial):
        """An end where a sender is: its last call."""
        toy = self.toy
        if partial and toy.spec.came and not (toy.spec.discarded or toy.spec.open == "unnamed"):
            brought = self.told([(name, value) for name, (value, _) in toy.spec.came.items()])
            self.whole.append({**self.told(toy.spec.served.items()), **brought})
        if toy.spec.open == "named" or self.sender is None or self.sender.door == "end":
            toy.finish(partial and toy.spec.open != "unnamed")
            self.check()
            self.sender = self.last = None

    @rule()
    def begin(self):
        """A session that its sender leaves open."""
        self.toy.begin()
        self.sender = None

    @rule()
    def empty_call(self):
        self.toy.load([])
        self.check()

    @rule()
    def withdraw(self):
        if not self.toy.spec.asleep:
            self.toy.withdraw()

    @rule(often=st.integers(0, 3))
    def discard(self, often):
        """With "model" rarely: nothing can be sent afterwards."""
        if not (self.toy.options.atomic == "model" and often) and not self.toy.spec.asleep:
            self.toy.discard()
            self.last = None
            self.sender = self.sender if self.toy.spec.anchor else None

    @rule()
    def sleep_and_wake(self):
        toy = self.toy
        toy.sleep(True)
        for call in (toy.begin, lambda: toy.load([(NAMES[0], 1)]), toy.request):
            call()
        toy.sleep(False)
        self.check()

    @rule(door=st.sampled_from(DOORS), order=orders, cuts=st.integers(1, 8))
    def whole_policy(self, door, order, cuts):
        """Nothing that was sent whole, without doubt, is refused."""
        toy, spec = self.toy, self.toy.spec
        if (
            spec.hopeless
            or (door in ("calls", "end") and spec.open)
            or (door == "one call" and spec.open == "named")
        ):
            return
        known = spec.anchor
        in_doubt = (
            known not in (None, self.first) or spec.ends if door == "calls" else door == "end" and known
        )
        in_doubt = in_doubt or (door in ("calls", "end") and spec.rest and not known)
        self.sender = self.waiting = None
        self.start(door, order, cuts, 0)
        sender = self.sender
        while self.sender is not None and self.sender.left:
            self.next_call_plain()
        self.request()
        waits = door in ("calls", "one call") and spec.unseen  # cannot be: these send their buffers
        if not in_doubt and not waits:
            assert spec.answers == ANSWERED and self.toy.managed[0].may_generate, f"refused: {sender}; {toy}"
            assert toy.live() | sender.policy == toy.live(), f"not served: {sender}; {toy}"

    def check(self):
        """What is ready was sent whole: apart from the specification."""
        for engine in () if self.toy.spec.asleep else self.toy.engines:
            if engine.managed.may_generate and engine.managed.version:
                live = self.toy.live(engine)
                assert any(policy and live | policy == live for policy in self.whole), (
                    f"{live} was not sent; {self.toy}"
                )

    def teardown(self):
        type(self).operations += self.toy.calls if hasattr(self, "toy") else 0


class TwoRanks(Updates):
    """The same on two ranks that agree; a fault is of one of them."""

    ranks = 2


SETTINGS = settings(
    print_blob=True,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def run(machine, operations, examples, steps):
    """Run at least so many operations on toys."""
    machine.operations = 0
    run_state_machine_as_test(
        machine, settings=settings(SETTINGS, max_examples=examples, stateful_step_count=steps)
    )
    print(f"{machine.operations} operations")
    assert machine.operations >= operations
