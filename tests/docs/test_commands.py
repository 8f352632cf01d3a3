"""Run what the documentation shows: shell blocks, Python blocks and TOML files.

A comment right before a block says otherwise: ``<!-- not run: REASON -->``, ``<!-- needs vllm -->`` (run where that is
installed) or ``<!-- output -->`` (what a command prints)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_blocks import PAGES, Block, blocks
from tree import TREE

SHELL = [b for b in blocks() if b.language in ("", "sh", "bash", "shell") and b.note != "output"]
PYTHON = [b for b in blocks() if b.language == "python"]
TARGETS = re.compile(r"(?:`|^)make ([a-z][\w.-]*)", re.M)
SCRIPTS = re.compile(r"python (?:-m )?((?:benchmarks|examples)/\w+\.py)((?: [^\s`|;&)]+)*)")


def _runs(block: Block) -> pytest.param:
    """The block as a parameter, marked with what it needs."""
    needs = block.note.removeprefix("needs ") if block.note.startswith("needs ") else ""
    marks = [getattr(pytest.mark, needs)] if needs else []
    if needs == "torch":
        marks = [pytest.mark.skipif(not find_spec("torch"), reason="no torch")]
    return pytest.param(block, id=str(block), marks=marks)


def _run(command: list[str], cwd: Path) -> str:
    """Run a command as a reader would, with this environment's commands and a home of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHPATCH", "VLLM_"))}
    binaries = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    env = {**kept, "PATH": binaries, "HOME": str(cwd), "XDG_CACHE_HOME": str(cwd / "cache"), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("block", [_runs(b) for b in (*SHELL, *PYTHON) if not b.note.startswith("not run")])
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    for name in ("examples", "benchmarks"):
        shutil.copytree(TREE / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    if block.language == "python":
        _run([sys.executable, "-c", block.text], tmp_path)
    for command in block.commands if block.language != "python" else ():
        assert not command.startswith(("pip ", "make ")), "it changes the environment: say why it is not run"
        _run(["bash", "-euc", command], tmp_path)


@pytest.mark.parametrize("block", [b for b in blocks() if b.note.startswith("not run")], ids=str)
def test_what_is_not_run_says_why(block: Block) -> None:
    assert len(block.note.removeprefix("not run:").strip()) > 10


@pytest.mark.parametrize("block", [b for b in blocks() if b.language in ("toml", "json")], ids=str)
def test_a_file_can_be_read(block: Block) -> None:
    from flashpatch import registry

    if block.language == "json":
        json.loads(block.text)
        return
    tables = tomllib.loads(block.text)
    for name in tables.get("enable", []):
        registry.family_of(name)
    for family in tables.keys() & registry.families().keys():
        assert tables[family].keys() <= registry.families()[family].options.keys()


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize(
    ("script", "options"), sorted({one for page in PAGES for one in SCRIPTS.findall(page.read_text())})
)
def test_a_script_has_the_options_shown(script: str, options: str) -> None:
    source = (TREE / script).read_text()
    for option in re.findall(r"--[\w-]+", options):
        assert option in source, f"{script} has no option {option}"


@pytest.mark.parametrize("target", sorted({it for page in PAGES for it in TARGETS.findall(page.read_text())}))
def test_make_has_the_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=TREE, capture_output=True, text=True)
    assert "No rule to make target" not in done.stderr
