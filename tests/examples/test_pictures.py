"""The pictures of the examples: drawn from recorded runs, looked at through matplotlib's own objects."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from example_pictures import imported, lines, png_text
from machine import limit
from tree import TREE

DRAWING = ("matplotlib.figure", "matplotlib.backends.backend_agg")
EXAMPLES, RECORDED = TREE / "examples", Path(__file__).parent / "recorded"
REWARD, MISMATCH = "critic/score/mean", "training/rollout_probs_diff_mean"

# Script, picture, and what it is called with after the picture's name.
RUNS = {
    "grpo": ("verl_cpu/plot.py", ["bf16.jsonl", "fp8.jsonl"]),
    "stream": ("verl_cpu/plot_stream.py", ["separate_async.jsonl", "stream_async.jsonl"]),
    "times": ("world/speed.py", ["stock.jsonl", "history.jsonl"]),
    "answers": ("verl_flowrl/plot.py", ["12", "grpo=grpo.answers", "flowrl=flowrl.answers"]),
}


def run(name: str, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Call an example's script as a file, in the folder of its recorded run."""
    script, arguments = RUNS[name]
    command = [str(EXAMPLES / script), str(out), *arguments]
    return python(command, RECORDED / name, flags)


def python(command: list[str], where: Path, flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a script, in a new interpreter if it has flags."""
    if not flags:
        return warm.run(DRAWING, command, env=os.environ, cwd=where, timeout=limit(120))
    return subprocess.run([sys.executable, *flags, *command], cwd=where, capture_output=True, text=True)


def rows(name: str, job: str) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in (RECORDED / name / f"{job}.jsonl").read_text().splitlines()]


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


def test_reward_and_mismatch_are_those_of_the_run(drawn):
    _, figure, said = drawn("grpo")
    left, right = figure.axes
    for job in ("bf16", "fp8"):
        gained = [row[REWARD] for row in rows("grpo", job)]
        mean = lines(left)[job]
        assert mean[0] == pytest.approx(gained[0]) and mean[11] == pytest.approx(statistics.mean(gained[4:]))
        wanted = [row[MISMATCH] for row in rows("grpo", job)]
        assert lines(right)[job] == pytest.approx(wanted, rel=1e-5)
        assert f"{job}: reward {statistics.mean(gained[:3]):.2f} in the first quarter" in said


def test_times_are_compared_by_token(drawn):
    numbers, _, said = drawn("times")
    stock, history = (rows("times", job)[1:] for job in ("stock", "history"))  # without the first step
    each = ([row["timing_s/gen"] / row["response_length/mean"] for row in one] for one in (stock, history))
    median = statistics.median(a / b for a, b in zip(*each, strict=True))
    ratio = numbers["ratio"]
    assert ratio["median"] == pytest.approx(median, rel=1e-5)
    shown = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    assert f"stock over history: rollouts {shown}" in said


def test_without_matplotlib_a_run_keeps_its_table_and_numbers(tmp_path, drawn):
    name = "stream"
    out = tmp_path / "out.png"
    done = run(name, out, "-S")  # without site-packages: these scripts need nothing else of them
    assert done.returncode == 0, done.stderr
    numbers, _, said = drawn(name)
    assert json.loads(out.with_suffix(".json").read_text()) == numbers and not out.exists()
    *table, last = done.stdout.splitlines()
    assert table == said.splitlines()[:-1] and table
    assert "pip install 'flashpatch[plot]'" in last and str(out.with_suffix(".json")) in last


def command(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return python([str(EXAMPLES / "pictures"), *arguments], TREE, flags)


def test_the_command_draws_files_again_and_says_what_is_wrong(pictures, tmp_path):
    numbers = {"picture": "reward and mismatch", "jobs": {"one": {"reward": [0.5], "mismatch": [0.1]}}}
    good, bad, unknown = (tmp_path / name for name in ("good.json", "bad.json", "unknown.json"))
    good.write_text(json.dumps(numbers))
    bad.write_text("{")
    unknown.write_text('{"picture": "a cat"}')
    (tmp_path / "to").mkdir()
    done = command(str(good), "--to", str(tmp_path / "to"))
    assert done.returncode == 0, done.stderr
    assert png_text(tmp_path / "to" / "good.png") == {"Numbers": pictures.digest(numbers)}
    done = command(str(unknown))
    assert done.returncode == 1 and "no picture is called 'a cat': one of reward and mismatch" in done.stderr
    assert command(str(bad)).returncode == 1 and command(str(tmp_path / "none.json")).returncode == 1
    done = command(str(good), flags=("-S",))
    assert done.returncode == 1 and done.stderr.endswith("pip install 'flashpatch[plot]'\n")
