"""Jobs that correct the mismatch of rollout and trainer in different ways: k3, and the largest importance weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def corrections(numbers: dict[str, Any]) -> Figure:
    """Draw ``k3`` and ``weight``, each a value by precision and by what was corrected."""
    made, (left, right) = figure(1, 2)
    _bars(left, "Mismatch of rollout and trainer", "k3, nats per token (mean of steps)", numbers["k3"])
    _bars(right, "Largest importance weight", "probability of trainer over rollout's", numbers["weight"])
    right.set_yticklabels([])
    right.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return made


def _bars(axes: Axes, title: str, unit: str, values: dict[str, dict[str, float]]) -> None:
    """Draw a group of bars per correction, with a bar per precision."""
    from matplotlib.ticker import NullFormatter

    kinds = list(dict.fromkeys(kind for found in values.values() for kind in found))
    width = 0.8 / len(values)
    for at, (name, found) in enumerate(values.items()):
        places = [kinds.index(kind) + (at - (len(values) - 1) / 2) * width for kind in found]
        axes.barh(places, list(found.values()), width, color=colour(at), label=name)
        for place, value in zip(places, found.values(), strict=True):
            axes.annotate(f" {value:.2g}", (value, place), va="center", fontsize="small")
    labelled(axes, title, unit, "", whole=False)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    every = [value for found in values.values() for value in found.values()]
    axes.set_xlim(10 ** math.floor(math.log10(min(every))), 10 ** math.ceil(math.log10(max(every)) + 0.2))
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
