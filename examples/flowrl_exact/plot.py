"""Draw what `compare.py` found, one page: ``python plot.py RESULTS.json OUT.png``. Needs matplotlib, no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as pyplot  # noqa: E402
from report import Result, interval, last, of_part  # noqa: E402

STYLE = Path(__file__).resolve().parents[1] / "flashpatch.mplstyle"
PATHS = {
    "GRPO": "GRPO",
    "GRPO, KL 0.001": "GRPO, KL 0.001",
    "REINFORCE, KL 0.25": "REINFORCE, KL 0.25 in the reward",
    "FlowRL, beta 5": "FlowRL as shipped",
    "FlowRL, beta 5, raw, group": "FlowRL, raw reward, log Z of the group",
}
CURVES = ("as shipped", "proj_z at 100x", "raw, the group's mean", "raw, exact log Z", "raw, group")
NETWORK = ("GRPO", "as shipped", "raw, exact log Z", "raw, group", "raw, group, beta 1")


def middle(result: Result, name: str) -> list[float]:
    """The mean over seeds at each measurement."""
    return [sum(values) / len(values) for values in zip(*result["curves"][name], strict=True)]


def path(axes, result: Result, label: str) -> None:
    """Effective number against reward, from the reference on."""
    axes.plot(middle(result, "reward"), middle(result, "effective"), marker=".", label=label)


def goal(axes, result: Result, label: str) -> None:
    target = result["target"]
    axes.plot(target["reward"], target["effective"], "*", color="black", markersize=11, label=label)


def bars(axes, results: list[Result], name: str) -> None:
    """The measure at the end with its interval, a bar per method."""
    found = [interval(last(result, name)) for result in results]
    places = range(len(results))
    colours = ["C2" if ", group" in r["method"]["name"] else "C0" for r in results]
    axes.barh(
        places, [mean for mean, _ in found], xerr=[half for _, half in found], color=colours, height=0.7
    )
    axes.set_yticks(places, [result["method"]["name"] for result in results])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def draw(results: list[Result], out: Path) -> None:
    """Write the page."""
    if STYLE.exists():
        pyplot.style.use(STYLE)
    parts = {name: of_part(results, name) for name in ("comparison", "terms", "strings", "transformer")}
    figure, grid = pyplot.subplots(2, 3, figsize=(15, 9), layout="constrained")

    axes = grid[0, 0]
    named = {row["method"]["name"].partition(" @ ")[0]: row for row in parts["comparison"]}
    for name, label in PATHS.items():
        path(axes, named[name], label)
    goal(axes, named["FlowRL, beta 5, raw, group"], "target")
    axes.set(title="Expressions: right answers kept as reward grows", xlabel="reward", ylim=(0, None))
    axes.set_ylabel("effective number of right answers")
    axes.legend(fontsize="small")

    axes = grid[0, 1]
    terms = {row["method"]["name"]: row for row in parts["terms"]}
    for name in CURVES:
        axes.plot(terms[name]["steps"], middle(terms[name], "variation"), label=name)
    axes.set(title="Expressions: distance to FlowRL's target", xlabel="step", ylabel="total variation")
    axes.set_ylim(0, None)
    axes.legend(fontsize="small")

    bars(grid[0, 2], parts["terms"], "variation")
    grid[0, 2].set(title="Which term: distance to the target at the end", xlabel="total variation")

    bars(grid[1, 0], parts["strings"], "variation")
    grid[1, 0].set(title="Strings of 1 to 8 letters: distance to each one's target", xlabel="total variation")
    bars(grid[1, 1], parts["strings"], "effective")
    grid[1, 1].set(title="Strings: right answers at the end, of 60", xlabel="effective number")
    grid[1, 1].set_yticklabels([])

    axes = grid[1, 2]
    network = {row["method"]["name"]: row for row in parts["transformer"]}
    for name in NETWORK:
        path(axes, network[name], name)
    goal(axes, network["raw, group"], "target")
    axes.set(title="Transformer on the expressions", xlabel="reward", ylim=(0, None))
    axes.set_ylabel("effective number of right answers")
    axes.legend(fontsize="small")
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
