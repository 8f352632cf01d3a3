"""Patches for another generation of a framework stand aside, also where the installed version has none of their modules."""

import pytest

MEMBERS = (
    '"toy.fakefw.moved", "fakefw.newer:plain", requires="fakefw>=2"',
    '"toy.fakefw_1_2.plain", "fakefw.core:plain", requires="fakefw>=1.2,<1.3"',
)
ASIDE = "superseded(those of fakefw_1_2, which are for the installed version)"


@pytest.mark.parametrize("order", [1, -1])
def test_those_whose_modules_are_never_imported(world, order):
    world.family(*MEMBERS[::order])
    world.run(f"""
        import flashpatch
        flashpatch.enable("toy")
        def found():
            return {{id: str(one.state) for id, one in flashpatch.status().items() if id.startswith("toy.")}}
        assert found()["toy.fakefw.moved"] == "waiting", found()
        import fakefw.core as core
        assert core.plain(1) == ("patched", 2)
        assert found() == {{"toy.fakefw.moved": {ASIDE!r}, "toy.fakefw_1_2.plain": "live(1 call)"}}, found()
    """)


def test_a_version_that_neither_is_for_refuses_them(world):
    world.family(*MEMBERS)
    world.framework_version("1.5.0")
    done = world.run("""
        import flashpatch
        flashpatch.enable("toy")
        import fakefw.core as core
        assert core.plain is core.BORN["plain"]
        found = [one.state.word for id, one in flashpatch.status().items() if id.startswith("toy.")]
        assert found == ["skipped", "skipped"], found
    """)
    assert "does not meet fakefw>=1.2,<1.3" in done.stderr
