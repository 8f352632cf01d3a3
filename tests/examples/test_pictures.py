"""The pictures of the examples: drawn from recorded runs, looked at through matplotlib's own objects."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import warm
from example_pictures import imported, png_text
from machine import limit
from tree import TREE

DRAWING = ("matplotlib.figure", "matplotlib.backends.backend_agg")
EXAMPLES, RECORDED = TREE / "examples", Path(__file__).parent / "recorded"

# Script, picture, and what it is called with after the picture's name.
RUNS = {
    "grpo": ("verl_cpu/plot.py", ["bf16.jsonl", "fp8.jsonl"]),
    "stream": ("verl_cpu/plot_stream.py", ["separate_async.jsonl", "stream_async.jsonl"]),
    "times": ("world/speed.py", ["stock.jsonl", "history.jsonl"]),
    "answers": ("verl_flowrl/plot.py", ["12", "grpo=grpo.answers", "flowrl=flowrl.answers"]),
}


def run(name: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Call an example's script as a file, in the folder of its recorded run."""
    script, arguments = RUNS[name]
    command = [str(EXAMPLES / script), str(out), *arguments]
    return warm.run(DRAWING, command, env=os.environ, cwd=RECORDED / name, timeout=limit(120))


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("matplotlib")
    with imported() as module:
        yield module


@pytest.fixture(scope="module")
def drawn(pictures, tmp_path_factory):
    """Numbers and figure by the name of a recorded run; the script wrote the first."""
    found = {}

    def get(name: str):
        if name not in found:
            out = tmp_path_factory.mktemp(name) / "out.png"
            done = run(name, out)
            assert done.returncode == 0, done.stderr
            numbers = json.loads(out.with_suffix(".json").read_text())
            assert png_text(out)["Numbers"] == pictures.digest(numbers)
            found[name] = numbers, pictures.figure(numbers), done.stdout
        return found[name]

    return get


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_drawn_with_what_it_said(name, drawn):
    _, figure, said = drawn(name)
    assert all(axes.get_xlabel() and axes.get_title(loc="left") for axes in figure.axes)
    assert len(said.splitlines()) > 1
