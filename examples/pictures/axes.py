"""What the pictures have in common: labelled axes, means over steps, names at the ends of lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#777777"
SMOOTH = 8  # steps in a running mean


def figure(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Make a figure that needs no display, and its axes as ``Figure.subplots`` gives them.

    ``figsize`` is in inches; the other options are those of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=options.pop("figsize", None))
    return made, made.subplots(rows, columns, **options)


def colour(at: int) -> str:
    """The colour of the series at this place, from the style."""
    import matplotlib

    colours = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return colours[at % len(colours)]


def labelled(axes: Axes, title: str, x: str, y: str, *, whole: bool = True) -> Axes:
    """Name axes with their units, start at zero unless values are negative, and set round ticks.

    ``whole``: those of ``x`` are whole numbers.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return axes


def running_mean(values: list[float], steps: int = SMOOTH) -> list[float]:
    """The mean of the last few values at each step."""
    windows = (values[max(0, at - steps + 1) : at + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def dots_and_mean(axes: Axes, first: int, curves: dict[str, list[float]]) -> None:
    """Draw a dot per step, a running mean, and each curve's name; ``first`` is the first value's step."""
    for at, (name, values) in enumerate(curves.items()):
        steps = range(first, first + len(values))
        axes.plot(steps, values, ".", color=colour(at), alpha=0.45, ms=5, mew=0, clip_on=False)
        axes.plot(steps, running_mean(values), color=colour(at), label=name)


def name_ends(axes: Axes, gap: float = 0.085) -> None:
    """Write each labelled line's name to the right of its last point, ``gap`` of the height apart at least.

    Call it when the limits of the axes are final.
    """
    low, high = axes.get_ylim()
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines.sort(key=lambda line: line.get_ydata()[-1])
    heights = [(line.get_ydata()[-1] - low) / (high - low) for line in lines]
    for at in range(1, len(heights)):
        heights[at] = max(heights[at], heights[at - 1] + gap)
    highest = 1.0
    for at in reversed(range(len(heights))):
        heights[at] = min(heights[at], highest)
        highest = heights[at] - gap
    for line, height in zip(lines, heights, strict=True):
        axes.annotate(
            line.get_label(),
            (1, height),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            annotation_clip=False,
        )
