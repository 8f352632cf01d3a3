"""Before a framework is imported: an index is read, nothing is loaded, and nobody can tell the difference."""

import json

import pytest

from flashpatch import index

HEAVY = ("wrapt", "asyncio", "inspect", "typing", "dataclasses", "ast", "packaging", "flashpatch.engine")
LOADED = "import sys; print(*sorted(sys.modules))"

# The toy families become built-in ones: in the index, and importable by their names.
BUILT_IN = """
import os, sys
from flashpatch import _index, index
import toys
for record in (toys.FAMILY, getattr(toys, "OTHER", toys.FAMILY)):
    _index.FAMILIES[record.name] = index.entry(record)
    sys.modules[f"flashpatch.patches.{record.name}"] = type(sys)(record.name)
    sys.modules[f"flashpatch.patches.{record.name}"].FAMILY = record
from flashpatch.bootstrap import start
os.environ["FLASHPATCH"] = "toy"
def asleep():
    return "flashpatch.engine" not in sys.modules
start()
assert asleep()
"""


@pytest.fixture
def built_in(toys):
    """Run code with the engine asleep behind the index."""
    return lambda code, **env: toys.run(BUILT_IN + code, **env)


SHOW = """
import json, os
names = ("FLASHPATCH", "FLASHPATCH_RESOLVED", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "RAY_RUNTIME_ENV_HOOK")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_a_bare_start_loads_next_to_nothing(world):
    off = set(world.run(LOADED, anew=True).stdout.split())
    for names in ("1", "fp8", ",".join(index.families())):
        on = set(world.run(LOADED, anew=True, FLASHPATCH=names).stdout.split())
        ours = {name for name in on if name.partition(".")[0] == "flashpatch"}
        assert "flashpatch.arming.standby" in ours
        assert not {name for name in ours if name.startswith("flashpatch.patches")}
        assert not (on - off) & set(HEAVY)
        assert len(on - off) <= 30, sorted(on - off)


@pytest.mark.parametrize(
    "env",
    [
        {"FLASHPATCH": "1"},
        {"FLASHPATCH": "int8, grpo,cpu"},
        {"FLASHPATCH": "flowrl", "FLASHPATCH_STRICT": "yes"},
        {"FLASHPATCH": "bf16", "RESOLVED": {"names": ["bf16"], "options": {"fp8": {"partial": True}}}},
    ],
    ids=str,
)
def test_children_are_told_what_the_engine_would_tell(world, env):
    if resolved := env.get("RESOLVED"):
        resolved = {"from": env["FLASHPATCH"], "strict": True, **resolved}
        env = {"FLASHPATCH": env["FLASHPATCH"], "FLASHPATCH_RESOLVED": json.dumps(resolved)}
    asleep = "import sys; assert 'flashpatch.engine' not in sys.modules"
    light = json.loads(world.run(SHOW + asleep, **env).stdout)
    assert not world.ledger.exists(), "a process that imports no framework is no part of a job"
    full = json.loads(world.run("from flashpatch import api; api.start()\n" + SHOW, **env).stdout)
    assert light == full and light["FLASHPATCH_RESOLVED"]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"FLASHPATCH": "fp8,int8"}, "two names of one family"),
        ({"FLASHPATCH": "fp8", "FLASHPATCH_LOG": "LOUD"}, "FLASHPATCH_LOG is 'LOUD'"),
        ({"FLASHPATCH": "fp8", "FLASHPATCH_STRICT": "maybe"}, "FLASHPATCH_STRICT is 'maybe'"),
        ({"FLASHPATCH": "fp8", "FLASHPATCH_CONFIG": "nowhere.toml"}, "cannot read config"),
        ({"FLASHPATCH": "fp8", "FLASHPATCH_RESOLVED": "{"}, "FLASHPATCH_RESOLVED is not what"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_at_the_start(world, env, says):
    assert says in world.run("", **env).stderr


def test_a_framework_that_is_loaded_already_is_left_to_the_engine(world):
    for package in ("verl", "verl/utils"):
        world.module(f"{package}/__init__.py", "")
    world.run("""
        import os, sys, verl
        from flashpatch.bootstrap import start
        os.environ["FLASHPATCH"] = "grpo"
        start()
        assert "flashpatch.engine" in sys.modules
    """)


@pytest.mark.parametrize("family", index.families())
def test_a_family_is_loaded_alone(world, family):
    world.under(FLASHPATCH=family)(f"""
        import sys
        from flashpatch.bootstrap import start
        start()
        from flashpatch import engine
        assert engine.enabled({family!r})
        loaded = {{name.split(".")[2] for name in sys.modules if name.startswith("flashpatch.patches.")}}
        assert loaded - {{"_shared"}} == {{{family!r}}}, loaded
        assert engine.manager.selection.names == ({family!r},)
    """)


def test_the_engine_comes_with_the_framework(toys, built_in):
    built_in("""
import json, subprocess, fakefw
assert asleep()
start(), start()
import fakefw.user
assert not asleep() and "asyncio" not in sys.modules
import fakefw.core as core, flashpatch
assert fakefw.user.plain(1) == core.plain(1) == ("patched", 2)
start()
assert flashpatch.status()["toy.fakefw.plain"].calls == 2 and flashpatch.status().names == ("toy",)
assert core.plain.__wrapped__ is core.BORN["plain"]
flashpatch.disable()
assert core.plain is fakefw.user.plain is core.BORN["plain"] and "FLASHPATCH" not in os.environ
""")
    [row] = [json.loads(path.read_text()) for path in toys.ledger.glob("*/row-*.json")]
    assert row["patches"]["toy.fakefw.plain"]["calls"] == 2 and row["versions"]["fakefw-cpu"] == "1.2.0"


@pytest.mark.parametrize(
    "call",
    [
        *("flashpatch.status()", "flashpatch.enable('other')", "flashpatch.disable('other')"),
        *("engine.options('toy')", "engine.statuses()", "engine.require('toy')"),
        *("ledger.role('driver')", "ledger.expect(1)"),
    ],
)
def test_any_question_wakes_the_engine(call, built_in):
    built_in(f"""
import flashpatch
from flashpatch import engine, ledger
{call}
assert engine.manager.selection.choices["toy"].options["bits"] == 16
import fakefw.core as core
assert core.plain(1) == ("patched", 2)
""")


def test_disabled_before_the_framework_comes(built_in):
    built_in("""
import flashpatch
flashpatch.disable("toy")
import fakefw.core as core
assert core.plain is core.BORN["plain"] and flashpatch.status().names == ()
""")


def test_a_variable_that_changes_is_obeyed_by_the_next_start_alone(built_in):
    built_in("""
os.environ.pop("FLASHPATCH"), os.environ.pop("FLASHPATCH_RESOLVED")
import fakefw.core as core
assert core.plain(1) == ("patched", 2) and "FLASHPATCH" not in os.environ
""")
    built_in("""
os.environ["FLASHPATCH"] = "other"
start()
import fakefw.core as core
assert core.plain is core.BORN["plain"] and core.Thing().method(1)[0] == "patched"
""")


@pytest.mark.parametrize("found", [None, True])
def test_an_engine_is_told_of_names_that_can_change_nothing(toys, found):
    code = f"""
import importlib.util, sys
from flashpatch.bootstrap import start
importlib.util.find_spec = lambda name: {found}
start()
sys.modules["vllm"] = sys
start()"""
    said = toys.run(code, FLASHPATCH="fsdp", anew=True).stderr
    assert ("flashpatch: fsdp changes nothing here" in said) == (not found)


def test_modules_that_slip_past_the_finder_are_seen_by_the_next_start(built_in):
    built_in("""
from flashpatch.arming import import_hooks as hooks
sys.meta_path.remove(hooks._finder)
import fakefw.core as core
assert asleep() and core.plain is core.BORN["plain"]
start()
assert core.plain(1) == ("patched", 2)
""")


def test_threads_that_import_at_once_find_their_modules_patched(toys, built_in):
    for number in range(20):
        toys.module(f"fakefw/m{number}.py", "import time\ntime.sleep(0.002)\ndef f():\n    return 1\n")
    toys.family(*(f'"toy.fakefw.f{i}", "fakefw.m{i}:f"' for i in range(20)))
    built_in("""
import importlib
wrong = []
def load(first):
    for i in range(20):
        name = f"fakefw.m{(first + i) % 20}"
        if importlib.import_module(name).f() != ("patched", 1):
            wrong.append(name)
sys.setswitchinterval(1e-5)
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    list(pool.map(load, (0, 5, 10, 15)))
assert not wrong, wrong
""")


def test_a_forked_child_wakes_by_itself_and_writes_its_own_row(toys, built_in):
    built_in("""
pid = os.fork()
if pid == 0:
    assert asleep()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
pid = os.fork()
if pid == 0:
    import fakefw.core as core
    assert core.plain(1) == ("patched", 2)
    from flashpatch import ledger
    ledger.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0 and asleep()
import fakefw.core as core
assert core.plain(1) == ("patched", 2)
""")
    rows = [json.loads(path.read_text()) for path in toys.ledger.glob("*/row-*.json")]
    assert [row["patches"]["toy.fakefw.plain"]["state"] for row in rows] == ["live", "live"]
    assert len({row["run"] for row in rows}) == 1 and len({row["pid"] for row in rows}) == 2


@pytest.mark.parametrize("place", ["", "/proc/nope"])
def test_a_ledger_that_cannot_be_written_never_breaks_the_start(world, place):
    world.ledger.write_text("in the way")
    env = {"FLASHPATCH": "fp8", "FLASHPATCH_LEDGER": place or str(world.ledger)}
    done = world.run("from flashpatch import ledger; ledger.role('driver'); print('on')", **env)
    assert done.stdout == "on\n" and "cannot be written: [Errno" in done.stderr


def test_an_index_that_is_behind_its_family_is_reported(built_in):
    done = built_in("""
_index.FAMILIES["toy"]["modules"] += " fakefw.gone"
import fakefw.core as core
assert core.plain(1) == ("patched", 2)
""")
    assert "the index of family toy is not up to date: run python -m flashpatch.write_index" in done.stderr
