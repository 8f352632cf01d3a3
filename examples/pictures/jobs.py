"""Training jobs by step: reward and mismatch, or reward and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import SMOOTH, colour, dots_and_mean, figure, labelled, name_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP = "training step"


def reward(axes: Axes, jobs: dict[str, list[float]], first: int = 1) -> None:
    """Draw the reward of jobs, a value per step from step ``first``."""
    dots_and_mean(axes, first, jobs)
    labelled(axes, f"Reward: steps, and mean of {SMOOTH}", STEP, "mean reward of a step")
    if 0 <= axes.dataLim.y0 and axes.dataLim.y1 <= 1:
        axes.set_ylim(0, 1)
    name_ends(axes)


def reward_and_mismatch(numbers: dict[str, Any]) -> Figure:
    """Draw ``jobs``: by name, ``reward`` and ``mismatch`` with a value per step from step 1."""
    made, (left, right) = figure(1, 2)
    jobs = numbers["jobs"]
    reward(left, {name: job["reward"] for name, job in jobs.items()})
    for at, (name, job) in enumerate(jobs.items()):
        right.plot(range(1, len(job["mismatch"]) + 1), job["mismatch"], color=colour(at), label=name, lw=1.3)
    labelled(right, "Mismatch of rollout and trainer", STEP, "mean |Δ probability| per token")
    name_ends(right)
    return made


def times(numbers: dict[str, Any]) -> Figure:
    """Draw two ``jobs`` from step 2: ``rollout_s``, ``reward`` per step; ``ratio``: per step, with an interval.

    ``ratio``, of seconds per response token, the first job's over the second's, has ``values``, and of their median
    ``median`` and the interval ``low`` to ``high``.
    """
    made, (left, middle, right) = figure(1, 3, figsize=(9.6, 3))
    jobs, ratio = numbers["jobs"], numbers["ratio"]
    first, second = jobs
    for at, (name, job) in enumerate(jobs.items()):
        left.plot(range(2, len(job["rollout_s"]) + 2), job["rollout_s"], "o-", color=colour(at), label=name)
    labelled(left, "Rollouts", STEP, "seconds per step")
    name_ends(left)
    steps = range(2, len(ratio["values"]) + 2)
    middle.axhspan(ratio["low"], ratio["high"], color=colour(2), alpha=0.18, lw=0)
    middle.axhline(ratio["median"], color=colour(2))
    middle.axhline(1, color="#888888", lw=0.8)
    middle.plot(steps, ratio["values"], "o", color=colour(2))
    title = f"Time per token: {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    labelled(middle, title, STEP, f"{first} over {second}")
    reward(right, {name: job["reward"] for name, job in jobs.items()}, first=2)
    return made
