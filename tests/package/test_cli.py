"""The command ``flashpatch`` as a user runs it: in a process of its own, its output read back.

The patches are those of a throw-away distribution, so that nothing here depends on a framework."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from flashpatch import registry
from flashpatch.record import Family, Patch

TOY = """
from flashpatch import Contract, Family, Option, Patch
def wrapper(original, *args, **kwargs):
    return original(*args, **kwargs)
def patch(what, **changes):
    record = dict(id=what, targets=("packaging.version:parse",), requires="packaging>=20", wrapper=wrapper,
                  why="because", how="so", remove_when="never")
    return Patch(**{**record, **changes})
fits = patch("toy.packaging.fits", contract=Contract(params=("version",)))
FAMILY = Family("toy", "a toy", (fits,), names={"loud": {"volume": 11}}, about={"loud": "as toy, but loud"},
                options={"volume": Option(5, "how loud", kind=int, least=0, most=11), "pitch": Option("low", "how high")},
                commands={"play": "toy_play", "jam": "toy_jam", "lost": "toy_lost"})
DRIFTED = Family("drifted", "one of two drifted",
                 (patch("drifted.packaging.well"),
                  patch("drifted.packaging.ill", contract=Contract(params=("nonsense",)))))
LONG = Family("long", "has an id that takes most of a line",
              (patch("long.packaging.maybe_override_dynamic_sd_cudagraph"),))
"""
ENTRY_POINTS = "[flashpatch.patches]\ntoy = toy:FAMILY\ndrifted = toy:DRIFTED\nlong = toy:LONG\n"
PLAY = """
HELP = "plays a tune, 100% of it"
def arguments(parser):
    parser.add_argument("tune")
def run(args):
    print(f"playing {args.tune}, json={args.json}")
    return 3
"""
JAM = """
HELP = "needs what is not there"
def arguments(parser):
    pass
def run(args):
    import no_such_band.drums
"""


@pytest.fixture(scope="module")
def toys(new_environment, wheel: Path):
    """An environment with the wheel and a distribution that brings the families ``toy`` and ``drifted``."""
    environment = new_environment()
    environment.pip("install", "--no-deps", wheel)
    info = environment.site / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (environment.site / "toy.py").write_text(TOY)
    (environment.site / "toy_play.py").write_text(PLAY.replace("100%", "100%%"))
    (environment.site / "toy_jam.py").write_text(JAM)
    (environment.site / "toy_lost.py").write_text("raise RuntimeError('100% broken')")
    return environment


def read(done: subprocess.CompletedProcess[str], code: int = 0):
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


class TestList:
    def test_one_that_does_not_fit_takes_its_family_along_and_fails_the_command(self, toys) -> None:
        done = toys.run("flashpatch", "list", "--json", FLASHPATCH="drifted")
        found = {patch["id"]: patch for patch in read(done, 1)["patches"]}
        assert found["drifted.packaging.ill"]["state"] == "skipped"
        assert "nonsense" in found["drifted.packaging.ill"]["contract"]
        assert found["drifted.packaging.well"]["detail"] == "family: drifted.packaging.ill failed"

    def test_each_name_takes_one_row(self, toys) -> None:
        done = toys.run("flashpatch", "list", FLASHPATCH="loud,drifted")
        rows = {line.split()[0]: line for line in done.stdout.splitlines()[2:-1]}
        assert rows.keys() == registry.names().keys() | {"toy", "loud", "drifted", "long"}
        assert rows["loud"].split()[1:] == ["yes", "waiting", "as", "toy,", "but", "loud"]
        assert rows["toy"].split()[1:] == ["yes", "disabled", "a", "toy"]
        assert done.returncode == 1
        assert rows["drifted"].split()[1] == "no" and "skipped(contract: " in rows["drifted"]

    def test_on_a_terminal_an_id_stays_in_one_piece(self, toys) -> None:
        shown = on_terminal([toys.home / "bin/flashpatch", "list", "long"], COLUMNS="80", NO_COLOR="1")
        assert "long.packaging.maybe_override_dynamic_sd_cudagraph" in shown
        assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in shown.splitlines()) <= 80


class TestShow:
    def test_every_field_of_the_record(self, toys) -> None:
        shown = set(read(toys.run("flashpatch", "show", "toy.packaging.fits", "--json")))
        code_only = {"wrapper", "apply", "undo", "native"}
        assert shown >= {field.name for field in fields(Patch)} - code_only
        assert shown >= {"contract_params", "contract_exists", "contract_mentions"}
        assert shown >= set("contract family framework installed state target tested tested_versions".split())

    @pytest.mark.parametrize("name", ["toy", "loud"])
    def test_a_family_by_any_of_its_names(self, name: str, toys) -> None:
        shown = read(toys.run("flashpatch", "show", name, "--json"))
        assert shown["family"] == "toy"
        assert shown["names"] == {"toy": {}, "loud": {"volume": 11}}
        range_ = "at least 0 and at most 11"
        assert shown["options"]["volume"] == dict(default=5, choices=[], range=range_, help="how loud")
        assert "range" not in shown["options"]["pitch"]
        assert set(shown) >= {field.name for field in fields(Family)} - {"too_late", "probe", "name"}

    def test_options_are_a_table_spelt_as_in_the_config(self, toys) -> None:
        printed = toys.run("flashpatch", "show", "toy").stdout.splitlines()
        assert "names     loud: volume = 11" in printed and "commands  flashpatch play" in printed
        assert [line for line in printed if line.startswith(("refuses", "not_on"))] == []
        assert printed[-3:] == [
            "option  default  values                                    meaning",
            "volume  5        a whole number at least 0 and at most 11  how loud",
            'pitch   "low"    text in quotes                            how high',
        ]


class TestCommandsOfFamilies:
    def test_one_runs_with_its_arguments_and_exit_code(self, toys) -> None:
        done = toys.run("flashpatch", "play", "reveille", "--json")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (3, "playing reveille, json=True")

    def test_a_caller_in_the_same_process_may_have_no_output(self, toys) -> None:
        code = """
        import contextlib
        from flashpatch.cli import main
        with contextlib.redirect_stdout(None):
            code = main(["play", "waltz"])
        print(code)
        """
        assert toys.python(textwrap.dedent(code)) == "3"

    def test_all_are_listed_the_broken_one_with_its_reason(self, toys) -> None:
        for words, code in (["--help"], 0), ([], 2):
            done = toys.run("flashpatch", *words, COLUMNS="200")
            printed = done.stderr if code else done.stdout
            assert done.returncode == code and "plays a tune, 100% of it" in printed
            assert "not available: RuntimeError: 100% broken" in printed


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        *((f"{command} Loud", 2, "Did you mean 'loud'?") for command in ("list", "show", "doctor")),
        ("show toy.packaging.fit", 2, "'toy.packaging.fits'? `flashpatch list toy` shows its patches."),
        ("show cpu.sglang.update_weight", 2, "'cpu.sglang.update_weights', 'eagle.verl.update_weights'?"),
        ("show lora", 2, "fp8_tensor, int8, int8_weight_only? 'lora' is part of what they change."),
        ("show true", 2, "FLASHPATCH=1 switches on what flashpatch.toml names, else fp8"),
        ("show zzz", 2, "no patch or family 'zzz'. `flashpatch list` shows all names."),
        ("WACTH anything", 2, "Did you mean 'watch'?"),
        ("verify anything", 2, "Did you mean 'flashpatch-verify'?"),
        (
            "FP8 anything",
            2,
            "`flashpatch list fp8` shows the patches of fp8, `flashpatch-verify fp8` proves them.",
        ),
        ("jam", 1, "'flashpatch jam' needs no_such_band, which is not installed."),
        ("lost anything --more", 1, "cannot be loaded from toy_lost: RuntimeError: 100% broken"),
    ],
)
def test_what_is_wrong_is_said_in_few_words(words: str, code: int, said: str, toys) -> None:
    done = toys.run("flashpatch", *words.split())
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
    assert len(done.stderr) < 500 and "Traceback" not in done.stderr


class TestSettingsOfDoctor:
    @staticmethod
    def settings(toys, **env: str) -> dict[str, tuple[object, str]]:
        found = json.loads(toys.run("flashpatch", "doctor", "--json", **env).stdout)["settings"]
        return {setting["name"]: (setting["value"], setting["source"]) for setting in found}

    def test_unset(self, toys) -> None:
        assert self.settings(toys)["names"] == ([], "default")
        assert self.settings(toys, FLASHPATCH="0")["names"] == ([], "FLASHPATCH")

    def test_preset_over_config_over_default(self, toys, tmp_path: Path) -> None:
        config = tmp_path / "mine.toml"
        config.write_text('enable = ["loud"]\nstrict = true\n[toy]\nvolume = 3\npitch = "high"\n')
        env = {"FLASHPATCH_CONFIG": str(config)}
        found = self.settings(toys, FLASHPATCH="1", **env)
        assert found["names"] == (["loud"], str(config))
        assert found["strict"] == (True, str(config))
        assert found["toy.volume"] == (11, "name 'loud'")
        assert found["toy.pitch"] == ("high", str(config))
        found = self.settings(toys, FLASHPATCH="toy", FLASHPATCH_STRICT="0", **env)
        assert found["names"] == (["toy"], "FLASHPATCH")
        assert found["strict"] == (False, "FLASHPATCH_STRICT")
        assert found["toy.volume"] == (3, str(config))
        assert self.settings(toys, FLASHPATCH="toy")["toy.pitch"] == ("low", "default")


class TestOutput:
    @pytest.mark.parametrize("command", ["list", "doctor"])
    def test_plain_text_into_a_pipe(self, command: str, toys) -> None:
        done = toys.run("flashpatch", command)
        assert done.returncode == 0 and done.stdout.isascii() and "\x1b" not in done.stdout

    @pytest.mark.parametrize(
        "command", [["flashpatch", "list"], ["python", "-m", "flashpatch", "list", "--json"]]
    )
    def test_a_reader_that_ends_first_is_no_error(self, command: list[str], toys) -> None:
        ours, theirs = os.pipe()
        os.close(ours)  # nobody reads
        whole, env = [toys.home / "bin" / command[0], *command[1:]], {"PATH": os.environ["PATH"]}
        done = subprocess.run(whole, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=toys.home, env=env)
        os.close(theirs)
        assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""

    @pytest.mark.parametrize("no_color", ["", "1"])
    def test_a_table_on_a_terminal(self, no_color: str, toys) -> None:
        output = on_terminal([toys.home / "bin/flashpatch", "list"], NO_COLOR=no_color, FLASHPATCH="toy")
        assert "┃" in output and "waiting" in output
        assert ("\x1b[33mwaiting" in output) != bool(no_color)  # yellow

    @pytest.mark.parametrize("command", ["list", "doctor"])
    def test_torch_is_never_imported(self, command: str, toys, tmp_path: Path) -> None:
        for name in ("torch", "vllm"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('caught importing it')")
        env = {"PYTHONPATH": str(tmp_path), "FLASHPATCH": "toy", "FLASHPATCH_LEDGER": str(tmp_path)}
        done = toys.run("flashpatch", command, **env)
        assert "caught importing it" not in done.stdout + done.stderr


def on_terminal(command: list[Path | str], **env: str) -> str:
    """What a command prints when its output is a terminal."""
    ours, theirs = pty.openpty()
    env = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "200", "LANG": "C.UTF-8", **env}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # how Linux says that the other side is closed
            while chunk := os.read(ours, 65536):
                output += chunk
        os.close(ours)
    assert process.returncode == 0, output
    return output.decode()
