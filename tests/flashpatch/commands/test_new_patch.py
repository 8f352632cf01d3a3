"""``flashpatch new-patch`` writes what the next command needs, and refuses what it cannot write."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from tree import TREE

pytestmark = pytest.mark.slow

TARGET = "rich.console:Console.print"
REFUSED = [
    (("nothing", TARGET), "there is no patches/nothing"),
    (("grpo", "rich.console.Console"), "is not of the form package.module:Qual.name"),
    (("grpo", "nosuchpackage.x:f"), "is not installed here"),
    (("grpo", "rich.console:Console.nothing"), "has no 'nothing' in Console"),
    (("grpo", "rich.console:Console"), "is no function or method"),
]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the tree that is imported in place of this one; returns what runs a command in it."""
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TREE / "flashpatch", tmp_path / "flashpatch", ignore=leave)
    for room in ("patches", "verify"):
        shutil.copytree(TREE / room, tmp_path / "flashpatch" / room, ignore=leave)
        (tmp_path / room).symlink_to(tmp_path / "flashpatch" / room)
    (tmp_path / "tests" / "patches" / "grpo").mkdir(parents=True)

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
        homes = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        env = {**kept, **homes, "FLASHPATCH": ""}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done

    return run


def test_it_writes_patch_record_and_test(checkout, tmp_path):
    said = json.loads(checkout("-m", "flashpatch", "new-patch", "grpo", TARGET, "--json").stdout)
    assert said["id"] == "grpo.rich.print"
    assert said["written"] == ["patches/grpo/print.py", "tests/patches/grpo/test_print.py"]
    for name in (*said["written"], *said["changed"]):
        compile((tmp_path / name).read_text(), name, "exec")
    if ruff := shutil.which("ruff", path=os.path.dirname(sys.executable)):
        written = [tmp_path / name for name in said["written"]]
        assert not subprocess.run(
            [ruff, "format", "--diff", "--config", TREE / "ruff.toml", *written]
        ).returncode
    shown = json.loads(checkout("-m", "flashpatch", "show", "grpo.rich.print", "--json").stdout)
    assert shown["contract"] == "holds" and shown["target"] == TARGET
    assert shown["contract_params"] == ["self"] and shown["tested_versions"] == []
    assert "grpo.rich.print" in (tmp_path / "flashpatch" / "_index.py").read_text()
    before = (TREE / "patches" / "grpo" / "__init__.py").read_text()
    after = (tmp_path / "patches" / "grpo" / "__init__.py").read_text()
    assert after.replace(", print)", ")").replace("import print, verl_config", "import verl_config") == before
    mine = tmp_path / said["written"][0]
    assert "tested=()" in mine.read_text(), "left out, it would claim the versions of its family"
    mine.write_text(mine.read_text() + "# mine\n")
    assert "exist" in checkout("-m", "flashpatch", "new-patch", "grpo", TARGET, code=1).stderr
    assert mine.read_text().endswith("# mine\n")


def test_the_patch_is_armed_and_passes_calls_on(checkout):
    checkout("-m", "flashpatch", "new-patch", "grpo", TARGET)
    done = checkout(
        "-c",
        """
import flashpatch, rich.console
before = rich.console.Console.print
flashpatch.enable("grpo")
assert flashpatch.status()["grpo.rich.print"].state.word == "installed", flashpatch.status()
rich.console.Console().print("passed", "on", sep="-")
flashpatch.disable("grpo")
assert rich.console.Console.print is before
""",
    )
    assert done.stdout == "passed-on\n"


def test_its_test_fails_until_it_is_written(checkout, tmp_path):
    checkout("-m", "flashpatch", "new-patch", "grpo", TARGET)
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "cpu_lab.py").write_text(
        "import subprocess, sys\ndef python(code, folder, imported=(), **extra):\n    return subprocess.run([sys.executable, "
        "'-c', code], capture_output=True, text=True)\n"
    )
    script = f"import sys; sys.path.insert(0, {str(lab)!r}); import pytest; sys.exit(pytest.main(['-q', 'tests/patches/grpo/test_print.py', '-p', 'no:cacheprovider']))"
    assert "1 failed" in checkout("-c", script, code=1).stdout


def test_what_it_cannot_write_it_refuses(checkout, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    for words, problem in REFUSED:
        assert problem in checkout("-m", "flashpatch", "new-patch", *words, code=1).stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == before
