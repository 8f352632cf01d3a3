"""The three pictures of `examples/eagle_cotrain.py`, drawn from a recorded run of two batch sizes."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from example_pictures import imported, lines, png_text, units
from tree import TREE

PLOT = TREE / "examples" / "eagle" / "plot.py"
RECORDED = Path(__file__).parent / "recorded" / "drift"
DRAFTERS = ("frozen", "co-trained")
NAMES = ["no speculation", "1 draft", "2 drafts", "3 drafts", "4 drafts"]
# Runs a script as if matplotlib were not installed.
WITHOUT = "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = sys.argv[1:]; " + (
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def rows(drafter: str, what: str, **wanted: object) -> list[dict]:
    found = map(json.loads, (RECORDED / f"{drafter}.jsonl").read_text().splitlines())
    return [row for row in found if row["what"] == what and all(row[key] == wanted[key] for key in wanted)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """The directory of the pictures, and what the script printed."""
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("drift")
    shutil.copytree(RECORDED, out, dirs_exist_ok=True)
    done = subprocess.run([sys.executable, str(PLOT), str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture
def axes(run):
    """The axes of a picture, drawn from what the script wrote."""
    with imported() as pictures:

        def drawn(name: str) -> list:
            numbers = json.loads((run[0] / f"eagle_{name}.json").read_text())
            assert png_text(run[0] / f"eagle_{name}.png")["Numbers"] == pictures.digest(numbers)
            figure = pictures.figure(numbers)
            drawn.legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
            return figure.axes

        yield drawn


def approx(values):
    return pytest.approx(list(values), rel=1e-5)


def test_acceptance_and_speed_by_round(axes):
    left, right = axes("acceptance")
    assert units(left) == ("round", "tokens per step") and left.get_ylim() == (0, 5)
    assert units(right) == ("round", "tokens per processor second") and right.get_ylim()[0] == 0
    for drafter in DRAFTERS:
        assert lines(left)[drafter] == approx(row["length"] for row in rows(drafter, "measured"))
        assert lines(right)[drafter] == approx(row["rate"] for row in rows(drafter, "bandit", batch=4))


def test_shares_of_arms_add_up_in_each_round(axes):
    panels = axes("arms")
    titles = [f"{drafter}, batch {batch}" for drafter in DRAFTERS for batch in (4, 32)]
    assert [panel.get_title(loc="left") for panel in panels] == titles
    assert panels[0].get_ylabel() == "steps, %" and panels[-1].get_xlabel() == "round"
    rounds = rows("frozen", "bandit", batch=32)
    drafts = [bar.get_height() for bar in panels[1].containers[4]]
    assert drafts == approx(
        100 * row["chosen"].get("4_1_5", 0) / sum(row["chosen"].values()) for row in rounds
    )
    for panel in panels:
        heights = [[bar.get_height() for bar in arm] for arm in panel.containers]
        assert [sum(shares) for shares in zip(*heights, strict=True)] == approx([100.0] * len(rounds))
    assert axes.legend == NAMES


def test_speed_shows_medians_over_no_speculation_and_every_turn(axes, run):
    [panel] = axes("speed")
    assert panel.get_ylabel() == "ratio to no speculation"
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["batch 4", "batch 32"]
    found = {(row["batch"], row["arm"]): row["rates"] for row in rows("co-trained", "speed")}
    arms = ["disable", "1_1_2", "2_1_3", "3_1_4", "4_1_5", "bandit"]
    medians = {key: statistics.median(turns) for key, turns in found.items()}
    for arm, bars in zip(arms, panel.containers, strict=True):
        heights = [bar.get_height() for bar in bars]
        assert heights == approx(medians[batch, arm] / medians[batch, "disable"] for batch in (4, 32))
    assert axes.legend == [*NAMES, "the bandit"]
    assert "bandit of best" in run[1] and "greedy answers unlike those without speculation" in run[1]


def test_without_matplotlib_tables_and_numbers_stay(run, tmp_path):
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-c", WITHOUT, str(PLOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, lost = (text.splitlines() for text in (run[1], done.stdout))
    assert lost[:-1] == said[:-3] and "pip install 'flashpatch[plot]'" in lost[-1]
    for name in ("acceptance", "arms", "speed"):
        written = (tmp_path / f"eagle_{name}.json").read_text()
        assert written == (run[0] / f"eagle_{name}.json").read_text()
    assert not list(tmp_path.glob("*.png"))
