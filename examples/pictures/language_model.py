"""A language model trained by several methods: right answers, and how many different ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def right_answers(numbers: dict[str, Any]) -> Figure:
    """Draw reward against different answers over training, pass@k, and distinct right answers at the end."""
    made, (kept, chances, distinct) = figure(1, 3, figsize=(15, 4.5))
    for at, (name, curve) in enumerate(numbers["paths"].items()):
        kept.plot(curve["reward"], curve["effective"], marker=".", color=colour(at), label=name)
    labelled(
        kept, "Over training", "share of right answers", "effective number of right answers", whole=False
    )
    kept.legend(fontsize="small")
    for at, (name, bars) in enumerate(numbers["pass_at"].items()):
        means, halves = ([bar[part] or 0.0 for bar in bars] for part in (0, 1))
        chances.errorbar(numbers["ks"], means, yerr=halves, capsize=3, color=colour(at), label=name)
    labelled(chances, "pass@k at the end", "k", "share of questions")
    chances.set_xscale("log", base=2)
    chances.set_xticks(numbers["ks"], [str(k) for k in numbers["ks"]])
    places = range(len(numbers["distinct"]))
    means, halves = ([bar[part] or 0.0 for bar in numbers["distinct"].values()] for part in (0, 1))
    distinct.barh(places, means, xerr=halves, color=[colour(at) for at in places], height=0.7)
    labelled(distinct, "Distinct right answers of 128, at the end", "answers", "", whole=False)
    distinct.set_yticks(places, list(numbers["distinct"]))
    distinct.invert_yaxis()
    return made
