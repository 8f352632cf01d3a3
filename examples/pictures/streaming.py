"""Training on whole batches beside training on groups as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .axes import colour, figure, labelled
from .jobs import reward

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AGES = ["0", "1", "2", "3", "4 or more"]
WAITS, TRAINS = "#d9d9d9", "#0072B2"


def streamed_training(numbers: dict[str, Any]) -> Figure:
    """Draw ``jobs`` (``reward`` per step; ``idle_s``, ``step_s`` from the second step on) and ``age_share`` of tokens."""
    made, axes = figure(2, 2, figsize=(8, 5.4), height_ratios=[1.3, 1])
    jobs = numbers["jobs"]
    reward(axes[0, 0], {name: job["reward"] for name, job in jobs.items()})
    _ages(axes[0, 1], numbers["age_share"])
    below = axes[1, 0].get_gridspec()[1, :]
    for unused in axes[1]:
        unused.remove()
    _timelines(made.add_subplot(below), jobs)
    return made


def _ages(axes: Axes, shares: list[float]) -> None:
    """Draw the share of tokens by age, in versions of the policy."""
    bars = axes.bar(AGES, [100 * share for share in shares], color=colour(2), width=0.7)
    axes.bar_label(bars, fmt="%.1f %%", padding=2)
    axes.set_title("Age of the tokens, stream_async")
    axes.set_xlabel("versions of the policy")
    axes.set_ylabel("tokens trained on, %")
    axes.set_ylim(0, 100)


def _timelines(axes: Axes, jobs: dict[str, Any]) -> None:
    """Draw what the trainer did, a bar per job from left to right, with a tick where a step ends."""
    for row, (name, job) in enumerate(jobs.items()):
        waits, trains, ends, at = [], [], [], 0.0
        for idle, step in zip(job["idle_s"], job["step_s"], strict=True):
            idle = min(idle, step)
            waits.append((at, idle))
            trains.append((at + idle, step - idle))
            at += step
            ends.append(at)
        axes.broken_barh(waits, (row, 0.5), color=WAITS, label="waits for samples" if not row else None)
        axes.broken_barh(trains, (row, 0.5), color=TRAINS, label="trains, sends weights" if not row else None)
        axes.vlines(ends, row, row + 0.56, color="#333333", lw=0.6)
        idle = sum(job["idle_s"])
        axes.text(0, row - 0.08, f"{name}: {at:.0f} s, waiting for {idle:.0f} s ({100 * idle / at:.0f} %)")
    labelled(axes, "The trainer's time", "seconds from the end of the first step (ticks: a step ends)", "")
    axes.set_ylim(len(jobs) - 0.35, -0.4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0)
