"""Different right answers that jobs still give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled, name_ends
from .jobs import STEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def right_answers(numbers: dict[str, Any]) -> Figure:
    """Draw ``jobs``: ``reward``, ``different``, ``effective``, each over the last ``window`` steps; ``total`` are right."""
    made, (left, middle, right) = figure(1, 3, figsize=(9.6, 3))
    window, total = numbers["window"], numbers["total"]
    panels = {
        "reward": (left, f"Reward, mean of {window} steps", "share of right answers"),
        "different": (middle, f"Different right answers in {window} steps", f"answers, of {total}"),
        "effective": (right, "Effective number of right answers", "answers per question"),
    }
    for key, (axes, title, unit) in panels.items():
        for at, (name, job) in enumerate(numbers["jobs"].items()):
            axes.plot(range(window, window + len(job[key])), job[key], color=colour(at), label=name)
        labelled(axes, title, STEP, unit)
    left.set_ylim(0, 1)
    middle.set_ylim(0, total)
    for axes in (left, middle, right):
        name_ends(axes)
    return made
