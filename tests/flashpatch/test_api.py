"""The four functions users call, and the families they find."""

import copy
import pickle

from flashpatch import PatchError

LATE = """
def late():
    import sys
    return "A Thing exists already." if "fakefw.core" in sys.modules else None
FAMILY = Family("toy", "", (patch("toy.fakefw.plain", "fakefw.core:plain"),), too_late=late)
"""


def test_status_prints_as_a_table_and_reads_as_a_mapping(toys):
    toys.run("""
        import flashpatch, fakefw.core as core
        status = flashpatch.enable("toy")
        assert status["toy.fakefw.plain"].state == flashpatch.State("installed")
        core.plain(1)
        status = flashpatch.status()
        found = status["toy.fakefw.plain"]
        assert (found.calls, found.target, found.version, found.tested, found.error) == (
            1, "fakefw.core:plain", "fakefw-cpu 1.2.0", True, None
        )
        lines = str(status).splitlines()
        assert repr(status).splitlines() == ["flashpatch: toy on", "  toy: 1 live", "  print() shows each patch"]
        assert lines[0] == "flashpatch: toy on"
        assert any(line.split() == "toy.fakefw.plain live(1 call) fakefw-cpu 1.2.0".split() for line in lines)
        assert status["other.fakefw.method"].state.word == "disabled" and lines[-1].endswith(" disabled")
        assert set(status) == set(flashpatch.list_patches()) > {"toy.fakefw.plain", "fp8.vllm.add_request"}
    """)


def test_a_name_without_its_frameworks_warns(world):
    world.family('"toy.ghost.run", "ghost.core:run", requires="ghost>=1"')
    said = world.run("import flashpatch; flashpatch.enable('toy')").stderr
    assert "toy changes nothing in this Python (more: flashpatch doctor): it waits for ghost (none" in said


def test_too_late_warns_and_is_in_the_status(world):
    world.families(LATE)
    world.run("""
        import warnings, flashpatch
        from flashpatch import ledger
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flashpatch.enable("toy")
            import fakefw.core as core
            assert flashpatch.enable("toy").warnings == (), "on since before"
            flashpatch.disable()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            status = flashpatch.enable("toy")
        assert [(w.category, str(w.message)) for w in caught] == [(UserWarning, "A Thing exists already.")]
        assert caught[0].filename == "<string>", "it points at the caller"
        assert status.warnings == ("A Thing exists already.",) and "A Thing exists already." in str(status)
        assert core.plain(1) == ("patched", 2)
        assert ledger.notes()["late"] == {"toy": "A Thing exists already."}
        import sys
        flashpatch.disable()
        del sys.modules["fakefw.core"]
        flashpatch.enable("toy")
        assert ledger.notes()["late"] == {"toy": None}, "it exists no more"
    """)


def test_too_late_in_strict_mode_changes_nothing(world):
    world.families(LATE)
    world.run("""
        import os, flashpatch, fakefw.core as core
        before = dict(os.environ)
        try:
            flashpatch.enable("toy", strict=True)
        except flashpatch.PatchError as error:
            assert "A Thing exists already." in str(error)
        else:
            raise AssertionError
        assert core.plain is core.BORN["plain"] and dict(os.environ) == before
        assert flashpatch.status()["toy.fakefw.plain"].state.word == "disabled"
    """)


def test_disable_of_what_is_off_is_no_error(toys):
    toys.run("""
        import flashpatch
        assert flashpatch.disable("toy").names == flashpatch.disable().names == ()
        import pathlib, os
        assert not pathlib.Path(os.environ["FLASHPATCH_LEDGER"]).exists(), "nothing on, no row"
    """)


def test_public_names_and_lazy_import(toys):
    toys.run("""
        import sys, flashpatch
        assert "flashpatch.api" not in sys.modules and "wrapt" not in sys.modules
        for name in flashpatch.__all__:
            assert getattr(flashpatch, name) is getattr(flashpatch, name)
        assert set(flashpatch.__all__) <= set(dir(flashpatch))
        from flashpatch import Contract, Family, Option, Patch, PatchError, disable, enable, list_patches, status
        try:
            flashpatch.absent
        except AttributeError as error:
            assert "'absent'" in str(error)
    """)


def test_record_call_makes_a_registration_live(world):
    world.families("""
def apply(site):
    site.module.BORN["mine"] = mine
def undo(site):
    del site.module.BORN["mine"]
def mine():
    from flashpatch import engine
    engine.record_call("toy.fakefw.registry")
FAMILY = Family("toy", "", (
    patch("toy.fakefw.registry", "fakefw.core:BORN", wrapper=None, apply=apply, undo=undo),
))
""")
    world.run("""
        import flashpatch, fakefw.core as core
        from flashpatch import engine
        flashpatch.enable("toy")
        assert flashpatch.status()["toy.fakefw.registry"].state.word == "installed"
        core.BORN["mine"]()
        assert str(flashpatch.status()["toy.fakefw.registry"].state) == "live(1 call)"
        assert engine.snapshot()["patches"]["toy.fakefw.registry"] == {
            "state": "live", "detail": "1 call", "calls": 1, "target": "fakefw.core:BORN", "tested": False
        }
        flashpatch.disable()
        assert "mine" not in core.BORN and engine.snapshot()["on"]["toy"]["off"]
        try:
            engine.record_call("toy.fakefw.absent")
        except flashpatch.PatchError as error:
            assert error.patch == "toy.fakefw.absent"
    """)


def test_a_broken_family_takes_no_other_along(toys):
    toys.module("broken.py", "raise OSError('broken')\n")
    toys.module("nothing.py", "")
    toys.module(
        "rooted.py",
        """
        from toykit import *
        TWICE = Family("toy", "", ())
        BUILT_IN = Family("mine", "", (), names={"int8": {}})
        COMMAND = Family("mine", "", (), commands={"profile": "mine"})
        LISTS = Family("mine", "", (), commands={"list": "mine"})
        NAMES = Family("names", "", (), names={"other": {}})
        ROOT = Family("root", "", (patch("root.fakefw.x", "fakefw:x"),))
        BARE = Family("bare", "", (patch("bare.fakefw.x"),))
    """,
    )
    families = ("TWICE", "NAMES", "ROOT", "BARE", "BUILT_IN", "COMMAND", "LISTS")
    entries = "".join(f"z_{name} = rooted:{name}\n" for name in families)
    entries = f"[flashpatch.patches]\na = broken\nb = nothing\n{entries}"
    toys.distribution("more", "1", {"entry_points.txt": entries})
    toys.run("""
        import flashpatch
        from flashpatch import registry
        assert {"toy", "other"} <= set(registry.families()) and "root" not in registry.families()
        found = " | ".join(registry.problems().values())
        for part in ("broken", "is no Family", "'toy' is taken", "'other' is taken", "a package root",
                     "'bare.fakefw.x' has no target", "'int8' is taken by family 'fp8'",
                     "'profile' is taken by 'fp8'", "'list' is taken by 'flashpatch itself'"):
            assert part in found, found
        try:
            flashpatch.enable("nothing")
        except flashpatch.PatchError as error:
            assert "entry point a = broken: OSError: broken" in str(error)
    """)


def test_a_snapshot_looks_for_each_framework_once(world):
    world.families("""
FAMILY = Family("toy", "", tuple(patch(f"toy.ghostfw.{name}", f"ghostfw.core:{name}") for name in "abc"))
""")
    world.run("""
        import flashpatch
        from flashpatch import engine
        from flashpatch.contracts import contract
        flashpatch.enable("toy")
        asked, inner = [], contract.installed_root
        contract.installed_root = lambda package: asked.append(package) or inner(package)
        assert {found["state"] for found in engine.snapshot()["patches"].values()} == {"skipped"}
        assert asked == ["ghostfw"]
    """)


def test_an_error_crosses_processes_whole():
    error = PatchError("is gone", patch="toy.fakefw.plain", target="m:f", version="v 1", advice="Do it.")
    assert str(error) == "[flashpatch: toy.fakefw.plain, m:f, v 1] is gone. Do it."
    assert str(error) in repr(error)
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(found) == str(error) and vars(found) == vars(error)
