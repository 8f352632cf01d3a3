"""Names, options and strictness: where they come from, which wins, and what is refused."""

import json

import pytest

from flashpatch import Family, Option, PatchError
from flashpatch.settings.options import checked

REFUSED = """
import json, os, flashpatch
def refused(*names, call=flashpatch.enable, **options):
    before = dict(os.environ), flashpatch.status().names
    try:
        call(*names, **options)
    except flashpatch.PatchError as error:
        assert (dict(os.environ), flashpatch.status().names) == before, "something changed"
        assert not isinstance(error.__context__, flashpatch.PatchError), "said twice"
        return str(error)
    raise AssertionError("accepted")
def options(family="toy"):
    from flashpatch import engine
    return dict(engine.options(family))
"""


@pytest.fixture
def refusing(toys):
    """Run code that may call ``refused()`` and ``options()``."""
    return lambda code, **env: toys.run(REFUSED + code, **env)


def test_unknown_name_lists_the_known_ones_and_the_nearest(refusing):
    refusing("""
message = refused("to")
assert "unknown name 'to'" in message and "Did you mean 'toy'?" in message, message
assert "other" in message and "toy8" in message
assert "Write 'toy', 'other'." in refused("toy,other", call=flashpatch.disable)
""")


@pytest.mark.parametrize("value", ["os.system", "toys:FAMILY", "../toy"])
def test_environment_and_config_name_patches_and_nothing_else(toys, value):
    toys.module("../cwd/flashpatch.toml", f'enable = ["{value}"]\n')
    code = """
        import sys, flashpatch
        from flashpatch.bootstrap import start
        start()
        assert "unknown name" in flashpatch.status().error, flashpatch.status()
        assert "fakefw" not in sys.modules and flashpatch.status().names == ()
    """
    toys.run(code, FLASHPATCH=value)
    toys.run(code, FLASHPATCH="1")
    resolved = json.dumps({"from": "x", "names": [value], "options": {}, "strict": False})
    toys.run(code, FLASHPATCH="x", FLASHPATCH_RESOLVED=resolved)


@pytest.mark.parametrize("text", ["enable = []", "enable = []\nstrict = true"])
def test_a_config_may_name_nothing(toys, text):
    toys.module("../cwd/flashpatch.toml", text)
    code = "import flashpatch.bootstrap as b; b.start(); import flashpatch; print(flashpatch.status().names)"
    assert toys.run(code, FLASHPATCH="1").stdout == "()\n"
    assert toys.run("import flashpatch; print(flashpatch.enable().names)").stdout == "()\n"


def test_unknown_and_wrong_options(refusing):
    refusing("""
message = refused("toy", bit=4)
assert "unknown option 'bit'" in message and "Did you mean 'bits'?" in message, message
assert refused("toy", bits=5).count("16") == 1
assert "not one of its values. Write bits = 4 or 8 or 16: Width." in refused("toy", bits=True)
assert "of type list" in refused("toy", exclude="model")
message = refused("fp8", scheme="fp8_per_chanel")
assert "Did you mean 'fp8_per_channel'? Write scheme = " in message and '"fp8_per_block"' in message, message
for call in flashpatch.enable, flashpatch.disable:
    assert "name is text, not ['fp8']. Write " + 'enable("fp8", "flowrl").' in refused(["fp8"], call=call)
assert "of type float. Write scale = a number: Scale." in refused("toy", scale="1")
assert "unknown option 'bits'" in refused("other", bits=4)
""")


def test_an_option_goes_to_every_family_that_has_it(refusing):
    refusing("""
flashpatch.enable("toy", "other", scale=3, bits=4)
assert options("toy") == {"bits": 4, "exclude": [], "scale": 3, "label": None}
assert options("other") == {"scale": 3}
""")


def test_two_names_of_one_family(refusing):
    refusing("""
assert "'toy' and 'toy8' are two names of one family" in refused("toy", "toy8")
flashpatch.enable("toy8")
assert "disable('toy8') first" in refused("toy")
assert flashpatch.enable("toy8", "toy8").names == ("toy8",)
flashpatch.disable("toy8")
assert flashpatch.enable("toy").names == ("toy",)
""")


def test_enable_replaces_the_name_that_the_environment_chose(refusing):
    refusing(
        """
from flashpatch.bootstrap import start
start()
assert options()["bits"] == 16
assert flashpatch.enable("toy8").names == ("toy8", "other") and options()["bits"] == 8
start()
assert flashpatch.status().names == ("toy8", "other") and os.environ["FLASHPATCH"] == "toy8,other"
""",
        FLASHPATCH="toy, other",
    )


def test_option_precedence(toys, refusing):
    toys.module("../cwd/flashpatch.toml", '[toy]\nscale = 5.0\nbits = 4\nlabel = "mine"\n')
    refusing("""
flashpatch.enable("toy")
assert options() == {"bits": 4, "exclude": [], "scale": 5.0, "label": "mine"}, "config over defaults"
flashpatch.disable()
flashpatch.enable("toy8")
assert options()["bits"] == 8, "the chosen name's preset over config"
flashpatch.enable("toy8", scale=7.0)
assert options()["scale"] == 7.0 and options()["bits"] == 8, "enable() over all"
flashpatch.enable("toy8")
assert options()["scale"] == 7.0, "idempotent"
""")


def test_patches_see_current_options(toys):
    toys.families("""
def apply(site):
    site.wrap(lambda original, x: site.options["bits"])
FAMILY = Family(
    "toy", "", (patch("toy.fakefw.plain", "fakefw.core:plain", wrapper=None, apply=apply),),
    options={"bits": Option(16, "Width.", kind=int)},
)
""")
    toys.run("""
        import flashpatch, fakefw.core as core
        flashpatch.enable("toy")
        assert core.plain(1) == 16
        flashpatch.enable("toy", bits=2)
        assert core.plain(1) == 2
    """)


def test_without_names_and_config_it_is_fp8(toys):
    assert toys.run("import flashpatch; print(flashpatch.enable().names)").stdout == "('fp8',)\n"


def test_what_the_name_decides_is_not_said_otherwise(refusing):
    refusing("""
said = "but the name 'int8' decides it: 'int8'. Leave precision out, or choose another name: fp8, bf16, "
assert "option 'precision' in enable() is 'fp8', " + said in refused("int8", precision="fp8")
open("flashpatch.toml", "w").write("[fp8]\\nprecision = 'bf16'")
assert "option 'precision' in [fp8] of flashpatch.toml is 'bf16', " + said in refused("int8")
assert flashpatch.enable("bf16", precision="bf16").names == ("bf16",)
""")


def test_wrong_config(refusing):
    wrong = {
        "enabled = []": "unknown key 'enabled'",
        "[toi]\nbits = 4": "Did you mean 'toy'?",
        "[toy8]\nbits = 4": "Options of toy8 stand under [toy].",
        "[toy]\nquick = yes": "The line is 'quick = yes': a value is true, false",
        "[toy]\nlabel = 4": "Write label = text in quotes: Label.",
        "toy = 4": "Write a table: [toy]",
        "[toy]\nbit = 4": "Did you mean 'bits'?",
        "[toy]\nbits = 5": "Write bits = 4 or 8 or 16",
        'enable = "toy"': "Give a list of names",
        "strict = 1": "Give true or false",
        "= 1": "cannot read config",
    }
    refusing(f"""
for text, message in {wrong!r}.items():
    with open("flashpatch.toml", "w") as file:
        file.write(text)
    assert message in refused("toy"), refused("toy")
""")


def test_resolved_data_serves_workers_in_another_directory(toys):
    toys.module("../cwd/flashpatch.toml", 'enable = ["toy"]\nstrict = true\n[toy]\nbits = 4\n')
    toys.under(FLASHPATCH="1")("""
        import json, os, subprocess, sys
        from flashpatch.bootstrap import start
        start()
        assert os.environ["FLASHPATCH"] == "1"
        data = json.loads(os.environ["FLASHPATCH_RESOLVED"])
        assert data["from"] == "1" and data["names"] == ["toy"] and data["strict"] is True
        assert data["options"]["toy"] == {"bits": 4, "exclude": [], "scale": 1.0, "label": None}
        code = (
            "from flashpatch.bootstrap import start; start();"
            "import flashpatch; from flashpatch import engine;"
            "print(flashpatch.status().names, flashpatch.status().strict, engine.options('toy')['bits'])"
        )
        def child(**env):
            return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, cwd="/",
                                  capture_output=True, text=True).stdout.strip()
        assert child() == "('toy',) True 4", child()
        assert child(FLASHPATCH="toy8,other") == "('toy8', 'other') False 8", child(FLASHPATCH="toy8,other")
    """)


def test_export_and_withdrawal(toys):
    toys.under(FLASHPATCH_LEDGER="rows", VLLM_RAY_EXTRA_ENV_VARS_TO_COPY="MINE, YOURS")("""
        import os, flashpatch
        from flashpatch.settings import child_env as forward
        before = dict(os.environ)
        flashpatch.enable("toy", "other")
        assert os.environ["FLASHPATCH"] == "toy,other" and os.environ["FLASHPATCH_RUN"]
        assert os.environ["FLASHPATCH_LEDGER"] == os.path.join(os.getcwd(), "rows")
        listed = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")
        assert listed[:2] == ["MINE", "YOURS"] and set(forward.VARIABLES) == set(listed[2:])
        assert forward.ray_env()["FLASHPATCH"] == "toy,other"
        flashpatch.enable("toy")
        assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",") == listed, "added once"
        flashpatch.disable("toy")
        assert os.environ["FLASHPATCH"] == "other"
        flashpatch.disable()
        after = dict(os.environ)
        del after["FLASHPATCH_RUN"], after["FLASHPATCH_BEGUN"]
        before["FLASHPATCH_LEDGER"] = after["FLASHPATCH_LEDGER"]
        assert after == {**before, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE,YOURS"}
    """)


def test_log_level_touches_no_other_logger(toys):
    done = toys.under(FLASHPATCH="toy", FLASHPATCH_LOG="info")("""
        import logging
        from flashpatch.bootstrap import start
        start()
        import fakefw.core
        assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING
    """)
    assert "toy.fakefw.plain installed on fakefw.core:plain (fakefw-cpu 1.2.0)" in done.stderr


def test_a_warning_is_heard_where_a_framework_lets_the_root_take_errors_alone(toys):
    done = toys.under(FLASHPATCH="toy")("""
        import logging
        from flashpatch.bootstrap import start
        logging.basicConfig()
        start()
        root, ours = logging.getLogger(), logging.getLogger("flashpatch.toy")
        ours.warning("the first")
        root.setLevel("ERROR")
        root.handlers[0].setLevel("ERROR")
        ours.warning("the second")
    """)
    assert done.stderr.count("the first") == done.stderr.count("the second") == 1


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "wanted"),
    [
        (dict(least=0, most=1), [0, 0.5, 1], [-0.1, 1.1], "at least 0 and at most 1"),
        (dict(above=0), [1e-9, 7], [0, -1, float("inf"), float("nan")], "above 0"),
        (dict(least=0, below=1), [0.0, 0.99], [1.0], "at least 0 and below 1"),
    ],
)
def test_a_number_is_in_the_range_of_its_option(bounds, good, bad, wanted):
    share = Option(None, "Share of requests.", kind=float, **bounds)
    family = Family("toy", "a toy", (), options={"share": share})
    assert share.range == wanted
    for value in (*good, None):
        assert checked(family, {"share": value}, "enable()") == {"share": value}
    for value in bad:
        with pytest.raises(PatchError) as error:
            checked(family, {"share": value}, "enable()")
        said = f"[flashpatch: toy] option 'share' in enable() is {value!r}, not {wanted}."
        assert str(error.value).startswith(said) and "Share of requests." in str(error.value)


@pytest.mark.parametrize(
    ("kind", "default", "bounds", "problem"),
    [
        (str, "", dict(least=1), "a range for an option of type str"),
        (int, 0, dict(least=1), "the default 0 of an option is not at least 1"),
        (float, 1.0, dict(least=0, above=0), "two bounds on one side"),
        (float, 1.0, dict(most=2, below=2), "two bounds on one side"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(kind, default, bounds, problem):
    with pytest.raises(ValueError, match=problem):
        Option(default, "", kind=kind, **bounds)


def test_a_list_holds_what_the_option_says():
    options = {
        "names": Option([], "Names.", kind=list),
        "tables": Option([], "Tables.", kind=list, items=dict),
    }
    family = Family("toy", "a toy", (), options=options)
    good = {"names": ["a"], "tables": [{"a": 1}]}
    assert checked(family, good, "here") == good
    for name, value, wanted in (("names", [{"a": 1}], "list of str"), ("tables", ["a"], "list of dict")):
        with pytest.raises(PatchError, match=f"of type {wanted}"):
            checked(family, {name: value}, "here")
