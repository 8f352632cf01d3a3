"""Print and draw what the runs of `compare.py` measured: means and 95 % intervals over seeds. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from answers import KS
from report import aligned, interval

Run = dict[str, Any]
SHARES = ("reward", "pass@4", "pass@16")
COLUMNS = (*SHARES, "distinct", "effective")


def line(run: Run) -> str:
    """One run in one line."""
    method, end = run["method"], run["held_out"]
    shown = ", ".join(f"{name} {end[name]:.2f}" for name in COLUMNS)
    return f"{method['name']} at {method['rate']:g}, seed {run['seed']}: {shown} ({run['seconds']:.0f} s)"


def best_rates(runs: list[Run]) -> list[Run]:
    """Keep of each method the run with the highest reward on the targets that training asked for."""
    tried = _grouped(runs, lambda run: run["method"]["name"])
    return [max(of_one, key=lambda run: run["trained"]["reward"]) for of_one in tried.values()]


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each method, over its seeds."""
    return _grouped(runs, lambda run: f"{run['method']['name']} @ {run['method']['rate']:g}")


def _grouped(runs: list[Run], name: Callable[[Run], str]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(name(run), []).append(run)
    return found


def tables(tried: list[Run], runs: list[Run]) -> str:
    """The learning rates that were tried, and the methods at the best of theirs, as text."""
    start = runs[0]["curve"][0]  # of half as many answers: what is counted does not compare
    before = ["before", *(f"{start[name]:.2f}" if name in SHARES else "" for name in COLUMNS)]
    heading = ["", *COLUMNS]
    parts = [
        ("learning rates, one seed, held-out numbers", by_method(tried), "held_out"),
        ("held-out numbers", by_method(runs), "held_out"),
        ("numbers of the training", by_method(runs), "trained"),
    ]
    return "\n\n".join(
        aligned(title, [heading, *([before] if where == "held_out" else []), *_rows(named, where)])
        for title, named, where in parts
    )


def _rows(named: dict[str, list[Run]], where: str) -> list[list[str]]:
    return [
        [name, *(_cell([run[where][column] for run in runs]) for column in COLUMNS)]
        for name, runs in named.items()
    ]


def _cell(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.2f}" if half != half else f"{mean:.2f} ± {half:.2f}"


def numbers(runs: list[Run]) -> dict[str, Any]:
    """Return what the picture shows: means over seeds by method."""
    named = {name.partition(" @ ")[0]: found for name, found in by_method(runs).items()}
    return {
        "picture": "right answers of a language model",
        "paths": {
            name: {what: _curve(found, what) for what in ("step", "reward", "effective")}
            for name, found in named.items()
        },
        "pass_at": {name: [_bar(found, f"pass@{k}") for k in KS] for name, found in named.items()},
        "ks": list(KS),
        "distinct": {name: _bar(found, "distinct") for name, found in named.items()},
    }


def _curve(runs: list[Run], what: str) -> list[float]:
    points = [[point[what] for point in run["curve"]] for run in runs]
    return [sum(values) / len(values) for values in zip(*points, strict=True)]


def _bar(runs: list[Run], what: str) -> list[float | None]:
    mean, half = interval([run["held_out"][what] for run in runs])
    return [mean, None if half != half else half]
