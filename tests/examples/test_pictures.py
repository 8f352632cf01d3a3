"""The pictures of the examples: drawn from recorded runs, looked at through matplotlib's own objects."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from example_pictures import imported, lines, png_text, units
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
    if not flags:
        return warm.run(DRAWING, command, env=os.environ, cwd=RECORDED / name, timeout=limit(120))
    return subprocess.run(
        [sys.executable, *flags, *command], cwd=RECORDED / name, capture_output=True, text=True
    )


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


def approx(values: list[float]):
    return pytest.approx(values, rel=1e-5)


def test_reward_is_drawn_by_step_with_its_running_mean_and_mismatch_beside_it(drawn):
    _, figure, said = drawn("grpo")
    left, right = figure.axes
    assert units(left) == ("training step", "mean reward of a step")
    assert units(right) == ("training step", "mean |Δ probability| per token")
    for job in ("bf16", "fp8"):
        gained = [row[REWARD] for row in rows("grpo", job)]
        dots = [line for line in left.get_lines() if line.get_marker() == "."]
        assert any(list(dot.get_ydata()) == approx(gained) for dot in dots)
        mean = lines(left)[job]
        assert mean[0] == pytest.approx(gained[0]) and mean[11] == pytest.approx(statistics.mean(gained[4:]))
        assert lines(right)[job] == approx([row[MISMATCH] for row in rows("grpo", job)])
        assert f"{job}: reward {statistics.mean(gained[:3]):.2f} in the first quarter" in said
    assert left.get_ylim() == (0, 1) and right.get_ylim()[0] == 0


def test_times_are_drawn_with_their_ratio_and_its_interval(drawn):
    numbers, figure, said = drawn("times")
    left, middle, right = figure.axes
    assert units(left) == ("training step", "seconds per step")
    assert units(middle) == ("training step", "stock over history")
    stock, history = (rows("times", job)[1:] for job in ("stock", "history"))  # without the first step
    each = [
        [row["timing_s/gen"] / row["response_length/mean"] for row in found] for found in (stock, history)
    ]
    ratios = [a / b for a, b in zip(*each, strict=True)]
    assert any(list(line.get_ydata()) == approx(ratios) for line in middle.get_lines())
    ratio = numbers["ratio"]
    assert ratio["median"] == pytest.approx(statistics.median(ratios), rel=1e-5)
    assert min(ratios) <= ratio["low"] * 1.00001 and ratio["high"] <= max(ratios) * 1.00001
    shown = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    assert shown in middle.get_title(loc="left") and f"stock over history: rollouts {shown}" in said
    assert set(lines(right)) == {"stock", "history"}


def test_streaming_shows_reward_ages_and_where_the_trainer_waits(drawn):
    numbers, figure, said = drawn("stream")
    left, right, below = figure.axes
    assert set(lines(left)) == {"separate_async", "stream_async"}
    assert units(right) == ("versions of the policy", "tokens trained on, %")
    streamed = rows("stream", "stream_async")
    share = statistics.mean(row["stream/staleness/1"] for row in streamed)
    heights = [bar.get_height() for bar in right.patches]
    assert len(heights) == 5 and heights[1] == pytest.approx(100 * share, rel=1e-5)
    assert sum(heights) == pytest.approx(100, abs=0.1)
    assert below.get_xlabel().startswith("seconds")
    for job in ("separate_async", "stream_async"):
        found = rows("stream", job)[1:]
        total, idle = (sum(row[what] for row in found) for what in ("timing_s/step", "timing_s/gen"))
        assert f"{job}: {total:.1f} s for 7 steps, trainer idle {idle:.1f} s" in said


def test_right_answers_are_counted_over_windows(drawn):
    numbers, figure, said = drawn("answers")
    left, middle, right = figure.axes
    assert units(left) == ("training step", "share of right answers") and left.get_ylim() == (0, 1)
    assert units(middle) == ("training step", "answers, of 110") and middle.get_ylim() == (0, 110)
    assert units(right) == ("training step", "answers per question")
    for job in ("grpo", "flowrl"):
        given = [
            [json.loads(line) for line in (RECORDED / "answers" / f"{job}.answers" / f"{step}.jsonl").open()]
            for step in range(1, 13)
        ]
        window = [row for rows in given[2:] for row in rows]
        right_ones = {
            (row["gts"], row["output"].replace("<|end|>", "").strip()) for row in window if row["score"]
        }
        assert lines(middle)[job][-1] == len(right_ones)
        assert lines(left)[job][-1] == pytest.approx(
            statistics.mean(row["score"] for row in window), rel=1e-5
        )
        assert len(lines(right)[job]) == 3 and all(1 <= value <= 20 for value in lines(right)[job])
        assert re.search(rf"{job}: .* then {len(right_ones)} of 110;", said)


@pytest.mark.parametrize("name", ["grpo", "stream", "times", "answers"])
def test_without_matplotlib_a_run_keeps_its_table_and_numbers(name, tmp_path, drawn):
    out = tmp_path / "out.png"
    done = run(name, out, "-S")  # without site-packages: these scripts need nothing else of them
    assert done.returncode == 0, done.stderr
    numbers, _, said = drawn(name)
    assert json.loads(out.with_suffix(".json").read_text()) == numbers and not out.exists()
    *table, last = done.stdout.splitlines()
    assert table == said.splitlines()[:-1] and table
    assert "pip install 'flashpatch[plot]'" in last and str(out.with_suffix(".json")) in last


def command(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    whole = [str(EXAMPLES / "pictures"), *arguments]
    if not flags:
        return warm.run(DRAWING, whole, env=os.environ, cwd=TREE, timeout=limit(120))
    return subprocess.run([sys.executable, *flags, *whole], capture_output=True, text=True)


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
