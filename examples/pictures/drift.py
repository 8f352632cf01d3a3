"""A policy that drifts, its drafters, and the bandit's arms."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from .axes import GREY, figure, labelled, name_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Darker with more drafts: a sequence keeps its order in any kind of colour vision, and in print.
SHADES = {
    "disable": "#c8c8c8",
    "1_1_2": "#c6dbef",
    "2_1_3": "#85bcdc",
    "3_1_4": "#4292c6",
    "4_1_5": "#08519c",
    "bandit": "#D55E00",
}
COLOURS = {"frozen": "#D55E00", "co-trained": "#0072B2"}


def acceptance(numbers: dict[str, Any]) -> Figure:
    """Draw ``length`` and ``rate``: by drafter, pairs of round and value; ``none``: pairs without speculation."""
    made, (left, right) = figure(1, 2)
    for name, points in numbers["length"].items():
        left.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=name)
    left.axvline(0, color=GREY, lw=0.9, ls=":")
    labelled(left, f"Acceptance length, {numbers['drafts']} drafts at every step", "round", "tokens per step")
    left.set_ylim(0, numbers["drafts"] + 1)
    left.annotate(
        "the policy drifts", (0, 0), xytext=(4, 6), textcoords="offset points", color=GREY, fontsize=9
    )
    name_ends(left)
    for name, points in numbers["rate"].items():
        right.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=name)
    right.plot(*zip(*numbers["none"], strict=True), "o-", color=GREY, label="no drafts")
    title = f"Speed with the bandit, batch {numbers['batch']}"
    labelled(right, title, "round", "tokens per processor second")
    name_ends(right)
    return made


def arms(numbers: dict[str, Any]) -> Figure:
    """Draw ``chosen``: by drafter and batch size, per round the steps of each arm."""
    chosen = numbers["chosen"]
    batches = list(next(iter(chosen.values())))
    made, axes = figure(len(chosen), len(batches), figsize=(8, 4.4), sharex=True, sharey=True, squeeze=False)
    for row, (name, by_batch) in enumerate(chosen.items()):
        for column, batch in enumerate(batches):
            _shares(axes[row, column], by_batch[batch])
            axes[row, column].set_title(f"{name}, batch {batch}", fontsize=9)
            axes[row, column].label_outer()
        axes[row, 0].set_ylabel("steps, %")
    for panel in axes[-1]:
        panel.set_xlabel("round")
    made.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SHADES) - 1)
    return made


def _shares(axes: Axes, rounds: list[dict[str, int]]) -> None:
    """Draw the shares of arms by round, one upon the other."""
    from matplotlib.ticker import MaxNLocator

    low = [0.0] * len(rounds)
    for arm in (arm for arm in SHADES if arm != "bandit"):
        share = [100 * counts.get(arm, 0) / (sum(counts.values()) or 1) for counts in rounds]
        axes.bar(range(len(rounds)), share, 0.85, bottom=low, color=SHADES[arm], label=_name(arm))
        low = [a + b for a, b in zip(low, share, strict=True)]
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.grid(False)


def speed(numbers: dict[str, Any]) -> Figure:
    """Draw ``rates``: by batch size and arm, tokens per processor second of each turn; bars are medians.

    Turns are dots where there are several.
    """
    made, axes = figure(1, 1, figsize=(8, 3.5))
    rates = numbers["rates"]
    names = list(next(iter(rates.values())))
    width = 0.9 / len(names)
    for at, name in enumerate(names):
        bases = [median(arms["disable"]) for arms in rates.values()]
        places = [group + (at - (len(names) - 1) / 2) * width for group in range(len(rates))]
        each = [arms[name] for arms in rates.values()]
        heights = [median(turns) / base for turns, base in zip(each, bases, strict=True)]
        axes.bar(places, heights, width * 0.92, color=SHADES[name], label=_name(name))
        for place, turns, base in zip(places, each, bases, strict=True):
            _turns(axes, place, turns, base)
    title = "Tokens per processor second (above the bars)"
    if any(len(turns) > 1 for arms in rates.values() for turns in arms.values()):
        title += ": medians, a dot per turn"
    labelled(axes, title, "", "ratio to no speculation")
    axes.set_xticks(range(len(rates)), [f"batch {batch}" for batch in rates])
    axes.margins(y=0.1)
    axes.axhline(1, color=GREY, lw=0.8)
    made.legend(loc="outside upper center", ncols=len(names), columnspacing=1.2)
    return made


def _turns(axes: Axes, place: float, turns: list[float], base: float) -> None:
    """Draw a dot for each turn over ``base`` if there are several, and above them the median itself."""
    if len(turns) > 1:
        axes.plot([place] * len(turns), [turn / base for turn in turns], ".", color="#222222", ms=2.5)
    above = dict(xytext=(0, 3), textcoords="offset points", ha="center", fontsize=7)
    axes.annotate(f"{median(turns):.0f}", (place, max(turns) / base), **above)


def _name(arm: str) -> str:
    """What readers call an arm: ``no speculation``, ``the bandit``, or its number of drafts."""
    if arm in ("disable", "bandit"):
        return {"disable": "no speculation", "bandit": "the bandit"}[arm]
    return f"{arm[0]} draft" if arm[0] == "1" else f"{arm[0]} drafts"
