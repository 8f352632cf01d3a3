"""Worlds whose target is known: right answers kept, and distances to the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EFFECTIVE = "effective number of right answers"
VARIATION = "total variation to the target"


def distances(numbers: dict[str, Any]) -> Figure:
    """Draw two rows: paths of reward and answers, distance over steps and at the end, in three worlds."""
    made, ((kept, over, terms), (strings, right, network)) = figure(2, 3, figsize=(15, 9))
    _paths(kept, "Expressions: right answers kept", numbers["kept"], numbers["kept_target"])
    for at, (name, curve) in enumerate(numbers["over_steps"].items()):
        over.plot(curve["steps"], curve["variation"], color=colour(at), label=name)
    labelled(over, "Expressions: distance over training", "step", VARIATION)
    over.legend(fontsize="small")
    _bars(terms, "Expressions: which term, at the end", numbers["terms"], VARIATION)
    _bars(strings, "Strings of 1 to 8 letters, at the end", numbers["strings"], VARIATION)
    _bars(right, "Strings: right answers at the end, of 60", numbers["strings_right"], EFFECTIVE)
    right.set_yticklabels([])
    _paths(network, "Transformer on the expressions", numbers["network"], numbers["network_target"])
    return made


def _paths(axes: Axes, title: str, curves: dict[str, Any], target: dict[str, float]) -> None:
    for at, (name, curve) in enumerate(curves.items()):
        axes.plot(curve["reward"], curve["effective"], marker=".", color=colour(at), label=name)
    axes.plot(target["reward"], target["effective"], "*", color="black", markersize=11, label="target")
    labelled(axes, title, "share of right answers", EFFECTIVE, whole=False)
    axes.legend(fontsize="small")


def _bars(axes: Axes, title: str, methods: dict[str, list[float]], unit: str) -> None:
    places = range(len(methods))
    means, halves = ([value[at] or 0.0 for value in methods.values()] for at in (0, 1))
    colours = [colour(2 if ", group" in name else 0) for name in methods]
    axes.barh(places, means, xerr=halves, color=colours, height=0.7)
    labelled(axes, title, unit, "", whole=False)
    axes.set_yticks(places, list(methods))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
