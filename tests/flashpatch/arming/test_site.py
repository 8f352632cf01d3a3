"""What a replacement looks like from outside: bindings, signature, pickling, stacking, ownership."""

import pytest


def test_scan_of_bindings_wakes_no_lazy_module(toys):
    toys.module("sleepy.py", "raise AssertionError('woken')")
    toys.run("""
        import importlib.util, sys, flashpatch, fakefw.core
        spec = importlib.util.find_spec("sleepy")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["sleepy"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        flashpatch.enable("toy")
        assert fakefw.core.plain(1) == ("patched", 2)
    """)


def test_replacement_looks_like_the_original(toys):
    toys.run("""
        import inspect, types, flashpatch, fakefw.core as core
        flashpatch.enable("toy", "other")
        assert type(core.plain) is types.FunctionType
        assert core.plain.__name__ == "plain" and core.plain.__doc__ == "Adds one."
        assert str(inspect.signature(core.Thing.method)) == "(self, x, *, by=1)"
        assert core.plain.__flashpatch__ == "toy.fakefw.plain"
        assert core.plain.__wrapped__ is core.BORN["plain"]
    """)


@pytest.mark.parametrize("library", ["pickle", "cloudpickle"])
def test_replacements_pickle_by_reference(toys, library):
    pytest.importorskip(library)
    toys.run(f"""
        import {library} as pickles, pickle, flashpatch, fakefw.core as core
        flashpatch.enable("toy", "other")
        for function in (core.plain, core.Thing.method):
            assert pickle.loads(pickles.dumps(function)) is function
        bound = pickle.loads(pickles.dumps(core.Thing().method))
        assert bound(1) == ("patched", 2)
    """)


def test_replacement_cloudpickled_by_value_works_elsewhere(toys):
    pytest.importorskip("cloudpickle")
    toys.run("""
        import cloudpickle, os, pickle, subprocess, sys, flashpatch, fakefw.core as core
        flashpatch.enable("toy")
        cloudpickle.register_pickle_by_value(core)
        data = cloudpickle.dumps(core.plain)
        code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))(1))"
        done = subprocess.run(
            [sys.executable, "-c", code, data.hex()], env={**os.environ, "FLASHPATCH": "0"},
            capture_output=True, text=True,
        )
        assert done.stdout.strip() == "('patched', 2)", done
        assert flashpatch.status()["toy.fakefw.plain"].calls == 0
    """)


STACK = """
    import functools, flashpatch, fakefw.core as core
    from fakefw.core import plain as early
    def stranger(inner):
        @functools.wraps(inner)
        def on_top(*args, **kwargs):
            return ("on top", inner(*args, **kwargs))
        return on_top
    def state():
        return flashpatch.status()["toy.fakefw.plain"].state
"""


@pytest.fixture
def stacked(toys):
    """Run code with strangers, who wrap what is wrapped."""
    return lambda code: toys.run(STACK + code)


def test_two_strangers_on_top_displace_and_undo_passes_through(stacked):
    stacked("""
    flashpatch.enable("toy")
    ours = core.plain
    core.plain = first = stranger(core.plain)
    core.plain = stranger(core.plain)
    assert core.plain(1) == ("on top", ("on top", ("patched", 2)))
    assert state().word == "displaced" and state().detail == "__main__.stranger.<locals>.on_top"
    flashpatch.disable()
    assert core.plain(1) == ("on top", ("on top", 2)), "a pass-through"
    assert state().word == "displaced"
    assert early is core.BORN["plain"], "where ours was outermost the original is back"
    flashpatch.enable("toy")
    assert core.plain(1) == ("on top", ("on top", ("patched", 2))), "not wrapped a second time"
    flashpatch.disable()
    core.plain = first
    core.plain = ours
    flashpatch.enable("toy"), flashpatch.disable()
    assert core.plain is core.BORN["plain"] and state().word == "disabled"
    """)


def test_stranger_who_restores_the_original_is_noticed(stacked):
    stacked("""
    flashpatch.enable("toy")
    core.plain = core.BORN["plain"]
    assert str(state()) == "displaced(nobody: the original was put back)"
    flashpatch.disable()
    assert core.plain is core.BORN["plain"] is early and state().word == "disabled"
    flashpatch.enable("toy")
    assert core.plain(1) == early(1) == ("patched", 2)
    """)


def test_strangers_beneath_own_the_attribute(stacked):
    stacked("""
    core.plain = theirs = stranger(stranger(core.plain))
    flashpatch.enable("toy")
    assert str(state()) == "skipped(owned by __main__.stranger.<locals>.on_top)"
    assert core.plain is theirs
    flashpatch.disable()
    assert core.plain is theirs
    """)


@pytest.mark.parametrize("kind", ["proxy", "method"])
def test_other_kinds_of_strangers_beneath(toys, kind):
    toys.run(f"""
        import wrapt, flashpatch, fakefw.core as core
        if {kind!r} == "proxy":
            core.plain = wrapt.FunctionWrapper(core.plain, lambda f, i, args, kwargs: f(*args, **kwargs))
            name, patch, owner = "toy", "toy.fakefw.plain", "_wrappers.FunctionWrapper"
        else:
            core.Thing.method = lambda self, x: x
            name, patch, owner = "other", "other.fakefw.method", "__main__.<lambda>"
        state = flashpatch.enable(name)[patch].state
        assert state.word == "skipped" and f"owned by {{owner}}" in state.detail, state
    """)


def test_a_decorator_of_the_frameworks_own_is_no_stranger(world):
    world.module(
        "library.py",
        """
        import functools
        def traced(inner):
            @functools.wraps(inner)
            def outer(*args, **kwargs):
                return inner(*args, **kwargs)
            return outer
    """,
    )
    world.module(
        "fakefw/decorated.py",
        """
        import functools, library
        @library.traced
        def traced(x):
            return x + 1
        @functools.lru_cache
        def remembered(x):
            return x + 1
    """,
    )
    world.family(*(f'"toy.fakefw.{name}", "fakefw.decorated:{name}"' for name in ("traced", "remembered")))
    world.run("""
        import flashpatch, fakefw.decorated as module
        print(flashpatch.enable("toy"))
        assert module.traced(1) == module.remembered(1) == ("patched", 2)
    """)


def test_class_is_not_wrapped_by_accident(world):
    world.family('"toy.fakefw.thing", "fakefw.core:Thing"')
    done = world.run("""
        import flashpatch, fakefw.core as core
        status = flashpatch.enable("toy")["toy.fakefw.thing"]
        assert status.state.word == "failed" and "is a class" in status.error, status
        assert isinstance(core.Thing, type)
    """)
    assert "Target a function, a method or a property" in done.stderr


@pytest.mark.parametrize("alias", [False, True])
def test_modules_are_searched_only_where_a_function_has_other_names(toys, alias):
    toys.module("fakefw/alone.py", "def f():\n    return 1\n")
    toys.module("fakefw/holder.py", "from fakefw.alone import f as renamed\n" if alias else "")
    toys.family('"toy.fakefw.f", "fakefw.alone:f"')
    toys.run(f"""
        import flashpatch, fakefw.alone, fakefw.holder
        from flashpatch.arming import site
        born, searched = id(fakefw.alone.f), []
        site.swap_bindings = lambda old, new: searched.append(id(old))
        flashpatch.enable("toy")
        assert searched == ([born] if {alias} else []), searched
    """)


def test_a_reload_is_noticed(toys):
    """The module's classes and functions are new objects, without patches."""
    toys.run("""
        import importlib, flashpatch, fakefw.core as core
        flashpatch.enable("toy", "other")
        states = lambda: {id: str(entry.state) for id, entry in flashpatch.status().items()}
        assert core.plain(1) == ("patched", 2)
        on = [id for id, state in states().items() if state.startswith(("installed", "live"))]
        importlib.reload(core)
        assert core.plain(1) == 2
        assert len(on) > 1 and {states()[id] for id in on} == {"displaced(a reload of fakefw.core)"}, on
        flashpatch.disable()
        assert {states()[id] for id in on} == {"disabled"}, on
    """)
