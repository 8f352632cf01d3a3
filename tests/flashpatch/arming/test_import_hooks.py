"""Hooks: when they fire, that they can be made inert, and that the user's import never suffers."""

import pytest


def test_nothing_of_the_framework_is_imported(toys):
    toys.run("""
        import sys, flashpatch
        flashpatch.enable("toy", "other")
        flashpatch.status(), flashpatch.disable()
        assert not [name for name in sys.modules if name.startswith("fakefw")]
    """)


def test_a_module_still_executing_waits_until_it_has_finished(toys):
    toys.module(
        "fakefw/half.py",
        """
        import flashpatch, sys
        flashpatch.enable("half")
        found = flashpatch.status()["half.fakefw.late"].state
        assert found.word == "waiting", found
        def late():
            return 1
    """,
    )
    late, plain = '"half.fakefw.late", "fakefw.half:late"', '"half.fakefw.plain", "fakefw.core:plain"'
    toys.family(late, plain, name="half")
    toys.run("""
        from fakefw.half import late
        import fakefw.core, fakefw.half, importlib.machinery, flashpatch
        assert late() == fakefw.half.late() == ("patched", 1)
        assert fakefw.core.plain(1) == ("patched", 2)
        assert flashpatch.status()["half.fakefw.late"].calls == 2
        spec = fakefw.half.__spec__
        assert type(spec) is importlib.machinery.ModuleSpec and not spec._initializing
    """)


def test_hook_never_breaks_the_import(toys):
    done = toys.run("""
        import flashpatch
        flashpatch.enable("toy")
        from flashpatch.arming import manager
        def boom(*args):
            raise RuntimeError("boom")
        manager.Manager._check = boom
        import fakefw.core
        assert fakefw.core.plain(1) == 2
    """)
    assert "hook on fakefw.core failed" in done.stderr and "boom" in done.stderr


READY = """
import importlib, importlib.util, sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from flashpatch.arming import import_hooks as hooks
seen = []
def wait(name, note=None):
    hooks.when_ready(name, lambda module: seen.append(note or module.__name__))
"""


@pytest.fixture
def waiting(world):
    """Run code that may `wait()` for modules and look at what was ``seen``."""
    return lambda code, **env: world.run(READY + code, **env)


def test_a_module_that_was_waited_for_is_as_it_would_be_without_us(waiting):
    waiting("""
wait("fakefw.core"), wait("fakefw")
import fakefw.core as core
assert seen == ["fakefw", "fakefw.core"] and fakefw.core is core if (fakefw := sys.modules["fakefw"]) else 0
for module in (core, fakefw):
    spec = module.__spec__
    assert type(spec) is ModuleSpec and not spec._initializing
    assert type(module.__loader__) is type(spec.loader) is SourceFileLoader
    assert spec.loader is module.__loader__ and spec.loader.name == module.__name__
importlib.reload(core)
assert seen == ["fakefw", "fakefw.core"], "a reload is no import"
wait("fakefw.core", "later")
assert seen[-1] == "later" and hooks.is_ready("fakefw.core") and not hooks.is_ready("fakefw.user")
""")


def test_a_look_at_a_spec_is_no_import(waiting):
    waiting("""
wait("fakefw.core")
spec = importlib.util.find_spec("fakefw.core")
assert spec.origin.endswith("core.py") and "plain" in spec.loader.get_source("fakefw.core")
assert seen == [] and spec.loader.is_package("fakefw.core") is False
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert seen == ["fakefw.core"] and type(module.__spec__.loader) is SourceFileLoader
""")


def test_a_module_runs_as_a_program(world, waiting):
    world.module("fakefw/program.py", "print(__name__, __spec__.name)\n")
    done = waiting("""
import runpy
wait("fakefw.program")
runpy.run_module("fakefw.program", run_name="__main__", alter_sys=True)
assert seen == []
""")
    assert done.stdout == "__main__ fakefw.program\n"


def test_a_failed_import_keeps_the_callback_for_the_next_one(world, waiting):
    world.module("fakefw/half.py", "import os\nif os.environ.pop('BREAK', ''):\n    raise OSError('first')\n")
    waiting(
        """
wait("fakefw.half")
try:
    import fakefw.half
except OSError:
    pass
assert seen == [] and "fakefw.half" not in sys.modules
import fakefw.half
assert seen == ["fakefw.half"]
""",
        BREAK="1",
    )


def test_a_callback_may_wait_for_the_module_that_it_was_called_for(waiting):
    waiting("""
hooks.when_ready("fakefw.core", lambda module: (wait("fakefw.core", "inner"), wait("fakefw.core", "next")))
wait("fakefw.core", "outer")
import fakefw.core
assert seen == ["outer", "inner", "next"], seen
""")


def test_another_tools_hooks_come_after_ours(waiting):
    """A tool that hooks the module later than we do finds it patched."""
    waiting("""
import wrapt
wait("fakefw.core", "ours")
wrapt.register_post_import_hook(lambda module: seen.append("theirs"), "fakefw.core")
import fakefw.core
assert seen == ["ours", "theirs"], seen
""")
