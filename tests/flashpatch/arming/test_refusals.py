"""When a patch cannot act: what the states say, that its family goes with it, and who is told."""

import pytest

ENABLE = """
    import flashpatch, fakefw.core as core
    status = flashpatch.enable("toy")
    def states():
        return {id: str(status.state) for id, status in flashpatch.status().items() if id.startswith("toy.")}
"""


@pytest.fixture
def enabled(world):
    """Run code after `enable("toy")`, whose ``status`` and `states()` it may look at."""
    return lambda code: world.run(ENABLE + code)


PLAIN = '"toy.fakefw.plain", "fakefw.core:plain"'


@pytest.mark.parametrize("target", ["fakefw.core:absent", "fakefw.core:Thing.absent", "fakefw.absent:plain"])
def test_absent_target(world, target, enabled):
    world.family(f'"toy.fakefw.absent", "{target}"', PLAIN)
    done = enabled(f"""
    found = states()
    assert "{target} is gone" in found["toy.fakefw.absent"], found
    assert found["toy.fakefw.plain"] == "skipped(family: toy.fakefw.absent failed)", found
    assert core.plain is core.BORN["plain"]
    """)
    assert "[flashpatch: toy.fakefw.absent" in done.stderr and "fakefw-cpu 1.2.0]" in done.stderr


def test_target_listed_where_it_is_re_exported_is_patched_where_it_is_defined(world):
    world.family('"toy.fakefw.plain", "fakefw.user:plain"')
    world.run("""
        import flashpatch
        flashpatch.enable("toy")
        import fakefw.user, fakefw.core
        assert flashpatch.status()["toy.fakefw.plain"].target == "fakefw.core:plain"
        assert fakefw.user.plain(1) == fakefw.core.plain(1) == ("patched", 2)
    """)


@pytest.mark.parametrize(
    ("version", "requires", "fits"),
    [
        ("1.2.0", "fakefw>=1", True),
        ("1.2.0", "fakefw>=2", False),
        ("2.1.0.dev7+g12ab", "fakefw>=2", True),
        ("2.1.0rc1", "fakefw>=2", True),
        ("2.0.0.dev7", "fakefw>=2", False),
        ("1.2.0+cpu", "fakefw==1.2.0", True),
    ],
)
def test_versions(world, version, requires, fits, enabled):
    world.framework_version(version)
    world.family(f'"toy.fakefw.plain", "fakefw.core:plain", requires="{requires}"')
    enabled(f"""
    found = status["toy.fakefw.plain"]
    assert found.version == "fakefw-cpu {version}", found
    assert found.tested is False
    if {fits}:
        assert found.state.word == "installed"
    else:
        assert str(found.state) == "skipped(fakefw-cpu {version} does not meet {requires})"
    """)


def test_package_without_a_distribution(world, enabled):
    (world.site / "fakefw_cpu.dist-info" / "RECORD").unlink()
    world.family(PLAIN)
    enabled("""
    assert "version of fakefw is unknown" in states()["toy.fakefw.plain"]
    """)


def test_editable_distribution(world, tmp_path):
    (world.site / "fakefw_cpu.dist-info" / "RECORD").unlink()
    world.family(PLAIN)
    world.site, source = tmp_path / "venv", world.site
    record = f'{{"url": "file://{source}", "dir_info": {{"editable": true}}}}'
    world.distribution("fakefw", "3.0", {"direct_url.json": record})
    world.run(f"""
        import sys
        sys.path.append({str(source)!r})
        import flashpatch, fakefw.core
        assert flashpatch.enable("toy")["toy.fakefw.plain"].version == "fakefw 3.0"
    """)


def test_framework_that_is_not_installed(world, enabled):
    world.family(PLAIN, '"toy.nofw.x", "nofw.core:x", requires="nofw"')
    enabled("""
    from flashpatch import engine
    assert states() == {"toy.fakefw.plain": "installed", "toy.nofw.x": "skipped(nofw is not installed)"}
    engine.require("toy")
    """)


def test_contract_that_drifted(world, enabled):
    contract = 'contract=Contract(params=("x", "weights"))'
    world.family(f'"toy.fakefw.plain", "fakefw.core:plain", {contract}')
    enabled("""
    found = states()["toy.fakefw.plain"]
    assert found.startswith("skipped(contract: ") and "'weights'" in found and "core.py:" in found, found
    assert core.plain is core.BORN["plain"]
    """)


def test_members_installed_already_leave_when_a_later_one_fails(world, enabled):
    world.module("fakefw/late.py", "def f(): pass\n")
    world.module("failing.py", "def apply(site):\n    site.wrap(print)\n    raise OSError('disk')\n")
    world.family(PLAIN, '"toy.fakefw.f", "fakefw.late:f", wrapper=None, apply=__import__("failing").apply')
    done = enabled("""
    from flashpatch import engine
    from fakefw.core import plain
    assert core.plain(1) == ("patched", 2)
    import fakefw.late
    assert states() == {
        "toy.fakefw.plain": "skipped(family: toy.fakefw.f failed)", "toy.fakefw.f": "failed(OSError: disk)"
    }
    assert flashpatch.status()["toy.fakefw.f"].error == "OSError: disk"
    assert core.plain is core.BORN["plain"], "undone"
    assert not hasattr(fakefw.late.f, "__flashpatch__"), "half applied, taken out"
    try:
        engine.require("toy")
    except flashpatch.PatchError as error:
        assert error.patch == "toy.fakefw.f" and error.version == "fakefw-cpu 1.2.0"
    else:
        raise AssertionError
    """)
    assert "Traceback" in done.stderr and "OSError: disk" in done.stderr


def test_undo_that_raises_lets_the_others_be_undone(world, enabled):
    world.module("failing.py", "def undo(site):\n    raise OSError('disk')\n")
    world.family(PLAIN, '"toy.fakefw.method", "fakefw.core:Thing.method", undo=__import__("failing").undo')
    enabled("""
    flashpatch.disable()
    assert core.plain is core.BORN["plain"]
    assert states()["toy.fakefw.method"] == "failed(undo: OSError: disk)"
    """)


TAKEN_ALONG = "skipped(family: toy.fakefw.method failed)"


@pytest.mark.parametrize(
    ("record", "state", "plain"),
    [
        ('native=lambda site: "core.reload"', "superseded(core.reload)", "installed"),
        # A question that the framework cannot answer.
        ("native=lambda site: 1 / 0", "installed", "installed"),
        ('conflicts=("rival",)', "skipped(conflicts with distribution rival)", TAKEN_ALONG),
        ('requires="not a requirement !"', "failed(InvalidRequirement", TAKEN_ALONG),
    ],
)
def test_what_a_record_says_decides_over_its_family(world, enabled, record, state, plain):
    world.distribution("rival", "1.0", {})
    world.family(PLAIN, f'"toy.fakefw.method", "fakefw.core:Thing.method", {record}')
    enabled(f"""
    found = states()
    assert found["toy.fakefw.method"].startswith({state!r}) and found["toy.fakefw.plain"] == {plain!r}, found
    assert (core.Thing.method is core.BORN["Thing.method"]) is ({state!r} != "installed")
    assert (core.plain is core.BORN["plain"]) is ({plain!r} != "installed")
    """)


NEEDY = """
FAMILY = Family("toy", "", (patch("toy.fakefw.plain", "fakefw.core:plain", needs=("other.fakefw.method",)),))
OTHER = Family("other", "", (patch("other.fakefw.method", "fakefw.core:Thing.method", requires="fakefw{}"),))
"""


def test_needs(world, enabled):
    world.families(NEEDY.format(">=1"))
    enabled("""
    assert states() == {"toy.fakefw.plain": "skipped(needs other.fakefw.method, which is not enabled)"}
    flashpatch.disable()
    flashpatch.enable("toy", "other")
    assert states() == {"toy.fakefw.plain": "installed"}
    flashpatch.disable("other")
    assert states() == {"toy.fakefw.plain": "skipped(needs other.fakefw.method, which is not enabled)"}
    assert core.plain is core.BORN["plain"]
    """)


def test_needs_of_a_refused_patch(world, enabled):
    world.families(NEEDY.format(">=9"))
    enabled("""
    flashpatch.disable()
    flashpatch.enable("toy", "other")
    assert states() == {"toy.fakefw.plain": "skipped(needs other.fakefw.method, which is refused)"}
    """)


CONFLICT = """
FAMILY = Family("toy", "", (
    patch("toy.fakefw.plain", "fakefw.core:plain", conflicts=("other.fakefw.method",)),
))
OTHER = Family("other", "", (patch("other.fakefw.method", "fakefw.core:Thing.method"),))
"""


@pytest.mark.parametrize("order", [("toy", "other"), ("other", "toy")])
def test_conflicting_patches_the_one_that_says_so_stands_down(world, order):
    world.families(CONFLICT)
    world.run(f"""
        import flashpatch
        flashpatch.enable(*{order})
        import fakefw.core
        found = flashpatch.status()
        assert found["other.fakefw.method"].state.word == "installed"
        assert str(found["toy.fakefw.plain"].state) == (
            "skipped(conflicts with other.fakefw.method, which is enabled)"
        )
    """)


def test_conflict_with_a_patch_that_is_armed_already(world, enabled):
    world.families(CONFLICT)
    enabled("""
    flashpatch.enable("other")
    found = flashpatch.status()
    assert found["toy.fakefw.plain"].state.word == "installed"
    assert "conflicts with toy.fakefw.plain" in found["other.fakefw.method"].state.detail
    """)


REFUSED = '"toy.fakefw.plain", "fakefw.core:plain", requires="fakefw>=9"'


def test_strict_raises_where_the_refused_capability_is_first_needed(world):
    world.family(REFUSED, '"toy.fakefw.method", "fakefw.core:Thing.method"')
    world.run("""
        import flashpatch
        flashpatch.enable("toy", strict=True)
        import fakefw.core as core
        from fakefw.core import plain
        for use in (lambda: plain(1), lambda: core.Thing().method(1)):
            try:
                use()
            except flashpatch.PatchError as error:
                assert error.patch == "toy.fakefw.plain" and "does not meet fakefw>=9" in str(error)
                assert error.target == "fakefw.core:plain" and "`flashpatch doctor`" in error.advice
            else:
                raise AssertionError
        flashpatch.disable()
        assert core.plain is plain is core.BORN["plain"]
        flashpatch.enable("toy", strict=False)
        assert plain(1) == 2
    """)


@pytest.mark.parametrize("strict", [True, False])
def test_family_may_refuse_a_constructor_without_strict_mode(world, strict):
    world.family(REFUSED, refuses='("fakefw.core:Thing.__init__",)')
    world.run(f"""
        import flashpatch
        flashpatch.enable("toy", strict={strict})
        import fakefw.core as core
        assert core.plain(1) == 2
        try:
            core.Thing()
        except flashpatch.PatchError as error:
            assert error.patch == "toy.fakefw.plain"
        else:
            raise AssertionError
        for again in range(2):
            flashpatch.disable()
            assert vars(core.Thing)["__init__"] is core.BORN["Thing.__init__"] and core.Thing()
            flashpatch.enable("toy")
    """)


def test_armed_family_guards_nothing(world, enabled):
    world.family(PLAIN, refuses='("fakefw.core:Thing.__init__",)')
    enabled("""
    assert vars(core.Thing)["__init__"] is core.BORN["Thing.__init__"]
    """)


def test_require(world):
    world.families()
    world.run("""
        import flashpatch
        from flashpatch import engine
        def refused(name):
            try:
                engine.require(name)
            except flashpatch.PatchError as error:
                return str(error)
        assert "is required and not enabled" in refused("toy")
        flashpatch.enable("toy8")
        assert refused("toy") is refused("toy8") is None
        import fakefw.core as core
        ours = core.plain
        core.plain = lambda x: ours(x)
        assert refused("toy") is None, "only strict mode minds"
        flashpatch.enable("toy8", strict=True)
        assert "displaced by __main__.<lambda>" in refused("toy")
    """)


def test_a_module_that_has_been_imported_is_a_conflict(monkeypatch):
    """One that is merely installed is none, and neither is one whose import is forbidden."""
    import sys
    from types import ModuleType

    from flashpatch import Patch
    from flashpatch.arming.preflight import examine

    given = "toy.packaging.parse", ("packaging.version:parse",), "packaging>=20", "why", "how", "never"
    patch = Patch(*given, wrapper=lambda original, *args: original(*args), conflicts=("a_rival.patches",))
    assert examine(patch).problem is None
    monkeypatch.setitem(sys.modules, "a_rival.patches", None)
    assert examine(patch).problem is None
    monkeypatch.setitem(sys.modules, "a_rival.patches", ModuleType("a_rival.patches"))
    assert examine(patch).problem == "conflicts with a_rival.patches, which is active in this process"


# Patches for another generation of a framework stand aside, also where the installed version has none of their modules.
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
