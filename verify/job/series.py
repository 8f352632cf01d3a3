"""Gather what a job measured over time into charts: acceptance, arms, mismatch, staleness, memory, step times."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from flashpatch.verify.job import page

Points = list[tuple[float, float]]
"""Steps or times, seconds since 1970, and values."""

Collected = dict[tuple[str, str], dict[str, Points]]
"""By id of a chart and what its points are by: the points of each line, by its label."""

_POINTS = 1200
"""The most points of one line; of longer ones the least and the largest value of each stretch are kept."""

_LINES = 12
"""The most lines of one chart."""


def add(collected: Collected, process: str, events: list[dict[str, Any]]) -> None:
    """Add what a process of this name measured."""
    for event in events:
        by, at = ("step", event["step"]) if event.get("step") is not None else ("time", event["t"])
        for chart, label, value in _values(process, event):
            collected.setdefault((chart, by), {}).setdefault(label, []).append((at, value))
    for arm, points in _arm_shares(events).items():
        collected.setdefault(("arms", "time"), {})[f"{arm}, {process}"] = points


def charts(collected: Collected) -> list[dict[str, Any]]:
    """Return the charts for which something was recorded.

    Each has ``id``, ``title``, ``unit``, ``by`` (``step`` or ``time``), ``lines`` (``label`` and ``points``), ``shown`` and ``lines_left_out``."""
    return [
        {"by": by, **_chart(id, title, unit, collected[id, by])}
        for id, (title, unit, *_) in page.said()["charts"].items()
        for by in ("step", "time")
        if (id, by) in collected
    ]


def _values(process: str, event: dict[str, Any]) -> list[tuple[str, str, float]]:
    name = event["event"]
    if name == "metrics":
        values = event.get("values", {}).items()
        return [(id, metric, float(value)) for metric, value in values for id in _shown_in(metric)]
    if name == "speculation" and event.get("drafted"):
        return [("acceptance", process, float(event.get("acceptance_length", 0)))]
    if name == "update" and event.get("rss_bytes"):
        return [("memory", process, event["rss_bytes"] / 2**20)]
    if name == "audit" and "failed" in event:
        return [("audit", process, float(event["failed"]))]
    return []


@cache
def _shown_in(metric: str) -> list[str]:
    """Return the ids of the charts that have a line of a metric."""
    charts = page.said()["charts"].items()
    return [id for id, (_, _, *patterns) in charts if any(re.match(one, metric) for one in patterns)]


def _arm_shares(events: list[dict[str, Any]]) -> dict[str, Points]:
    """Return per arm its share of the steps since the sample before."""
    shares: dict[str, Points] = {}
    before: dict[str, int] = {}
    for event in events:
        if event["event"] != "speculation" or not isinstance(event.get("arms"), dict):
            continue
        now = {str(arm): int(count) for arm, count in event["arms"].items()}
        since = {arm: count - before.get(arm, 0) for arm, count in now.items()}
        total = sum(since.values())
        if total > 0:
            for arm, count in since.items():
                shares.setdefault(arm, []).append((event["t"], max(count, 0) / total))
            before = now
    return shares


def _chart(id: str, title: str, unit: str, lines: dict[str, Points]) -> dict[str, Any]:
    recorded = sum(map(len, lines.values()))
    shown = [{"label": label, "points": thinned(points)} for label, points in list(lines.items())[:_LINES]]
    return {
        "id": id,
        "title": title,
        "unit": unit,
        "lines": shown,
        "recorded": recorded,
        "shown": sum(len(line["points"]) for line in shown),
        "lines_left_out": max(len(lines) - _LINES, 0),
    }


def thinned(points: Points, most: int = _POINTS) -> Points:
    """Return at most ``most`` points: of each stretch the one with the least and the one with the largest value."""
    if len(points) <= most:
        return points
    stretches = most // 2
    kept = []
    for number in range(stretches):
        stretch = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        low, high = min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept
