"""Reward of jobs by the seconds that they have trained, a few seeds of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled, name_ends, running_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 3  # in a running mean


def by_seconds(numbers: dict[str, Any]) -> Figure:
    """Draw ``jobs``: by name, a list of seeds with ``seconds`` (since the first step began) and ``reward`` after each step.

    A thin line is a seed, the thick one goes through their means, step by step.
    """
    made, axes = figure()
    for at, (name, seeds) in enumerate(numbers["jobs"].items()):
        for seed in seeds:
            axes.plot(
                seed["seconds"], running_mean(seed["reward"], STEPS), color=colour(at), alpha=0.35, lw=0.8
            )
        seconds, reward = (
            [sum(step) / len(step) for step in zip(*(seed[part] for seed in seeds), strict=True)]
            for part in ("seconds", "reward")
        )
        axes.plot(seconds, running_mean(reward, STEPS), color=colour(at), label=name)
    labelled(axes, f"Reward, mean of {STEPS} steps", "seconds of training", "mean reward of a step")
    axes.set_ylim(0, 1)
    name_ends(axes)
    return made
