"""Speculation, precision and streaming together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import GREY, colour, figure, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS = ("rollout", "step", "step, streaming")


def speed(numbers: dict[str, Any]) -> Figure:
    """Draw ``bars``: by name, how many times faster rollout, step and streamed step are than without any of it."""
    made, axes = figure(1, 1, figsize=(8, 3.5))
    groups = numbers["bars"]
    for at, name in enumerate(BARS):
        places = [group + (at - 1) * 0.28 for group in range(len(groups))]
        heights = [values[at] for values in groups.values()]
        axes.bar(places, heights, 0.25, color=colour(at), label=name)
        for place, height in zip(places, heights, strict=True):
            above = dict(xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7)
            axes.annotate(f"{height:.1f}", (place, height), **above)
    labelled(axes, numbers["on"], "", "times faster than none")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.axhline(1, color=GREY, lw=0.8)
    axes.margins(y=0.1)
    made.legend(loc="outside upper center", ncols=len(BARS))
    return made
