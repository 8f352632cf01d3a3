"""Every order of import, enable, enable, disable, disable: patched or restored, never anything in between."""

from itertools import permutations

import pytest

FAMILY = """
def member(name, wrapper=patched):
    return patch(f"kinds.fakefw.{name.split('.')[-1]}", f"fakefw.core:{name}", wrapper=wrapper)
FAMILY = Family("kinds", "every kind of attribute", (
    member("plain"),
    member("later", patched_later),
    member("Thing.method"),
    member("Thing.build"),
    member("Thing.static"),
    member("Thing.prop"),
    member("Thing.cached"),
    member("Child.handed_down"),
))
"""

SCENARIO = """
import asyncio, inspect, sys
import flashpatch
def check(on):
    import fakefw.core as core
    def expect(got, plain):
        assert got == (("patched", plain) if on else plain), (got, plain, on)
    thing = core.Thing()
    expect(core.plain(1), 2)
    expect(asyncio.run(core.later(1)), 2)
    assert inspect.iscoroutinefunction(core.later)
    expect(thing.method(1, by=2), 3)
    expect(core.Thing.build(5), ("Thing", 5))
    expect(thing.build(5), ("Thing", 5))
    expect(core.Thing.static(1), 2)
    thing.prop = 2
    expect(thing.prop, 2)
    expect(thing.cached, 12)
    expect(core.Child().handed_down(1), 2)
    assert core.Base().handed_down(1) == 2 and thing.handed_down(1) == 2
    if not on:
        assert core.plain is core.BORN["plain"] and core.later is core.BORN["later"]
        for name, value in vars(core.Thing).items():
            assert value is core.BORN[f"Thing.{name}"], name
        assert "handed_down" not in vars(core.Child)
def step(word):
    if word == "import":
        import fakefw.core
    else:
        getattr(flashpatch, word)("kinds")
on = False
for word in ORDER:
    step(word)
    on = on if word == "import" else word == "enable"
    words = {s.state.word for s in flashpatch.status().values() if s.id.startswith("kinds.")}
    if "fakefw.core" not in sys.modules:
        assert words == ({"waiting"} if on else {"disabled"}), words
    else:
        assert words <= ({"installed", "live"} if on else {"disabled"}), words
        check(on)
        if on:
            counted = {s.id: s.calls for s in flashpatch.status().values() if s.id.startswith("kinds.")}
            assert all(counted.values()), counted
"""

ORDERS = sorted(set(permutations(("import", "enable", "enable", "disable", "disable"))))


@pytest.mark.parametrize("first", ["import", "enable", "disable"])
def test_order(world, first):
    """Each order in a process of its own, forked before anything of FlashPatch is imported."""
    world.families(FAMILY)
    orders = [order for order in ORDERS if order[0] == first]
    world.run(f"""
import os
for ORDER in {orders!r}:
    child = os.fork()
    if not child:
        break
    assert os.waitpid(child, 0)[1] == 0, ORDER
else:
    os._exit(0)
{SCENARIO}""")


TWO = """
def family(name):
    def around(original, *args, **kwargs):
        return (name, original(*args, **kwargs))
    patches = (patch(f"{name}.fakefw.plain", "fakefw.core:plain", wrapper=around),)
    return Family(name, "one of two", patches)
FAMILY = family("alpha")
OTHER = family("beta")
"""

STACKS = """
import os
import flashpatch
for first, second in (("alpha", "beta"), ("beta", "alpha")):
    for how in ("together", "one by one", "loaded"):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0, (first, second, how)
            continue
        if how == "loaded":
            import fakefw.user
        if how == "one by one":
            flashpatch.enable(first)
            flashpatch.enable(second)
        else:
            flashpatch.enable(first, second)
        import fakefw.core as core, fakefw.user as user
        assert core.plain(1) == user.plain(1) == ("beta", ("alpha", 2)), core.plain(1)
        flashpatch.disable(second)
        assert core.plain(1) == user.plain(1) == (first, 2), core.plain(1)
        flashpatch.disable(first)
        assert core.plain is user.plain is core.BORN["plain"]
        os._exit(0)
"""


def test_families_that_wrap_one_function_have_one_order_however_they_were_named(world):
    """``beta`` is outermost, after ``alpha`` by name, also if it was switched on first, before the import."""
    world.families(TWO)
    world.run(STACKS)
