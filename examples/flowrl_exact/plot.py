"""Reduce what `compare.py` found to the numbers that its page of pictures shows. Needs no torch."""

from __future__ import annotations

from typing import Any

from report import Result, interval, last, of_part

PATHS = {
    "GRPO": "GRPO",
    "GRPO, KL 0.001": "GRPO, KL 0.001",
    "REINFORCE, KL 0.25": "REINFORCE, KL 0.25 in the reward",
    "FlowRL, beta 5": "FlowRL as shipped",
    "FlowRL, beta 5, raw, group": "FlowRL, raw reward, log Z of the group",
}
CURVES = ("as shipped", "proj_z at 100x", "raw, the group's mean", "raw, exact log Z", "raw, group")
NETWORK = ("GRPO", "as shipped", "raw, exact log Z", "raw, group", "raw, group, beta 1")


def numbers(results: list[Result]) -> dict[str, Any]:
    """Return means over seeds, and half the widths of their 95 % intervals, by panel and method."""
    parts = {name: of_part(results, name) for name in ("comparison", "terms", "strings", "transformer")}
    named = {row["method"]["name"].partition(" @ ")[0]: row for row in parts["comparison"]}
    terms = {row["method"]["name"]: row for row in parts["terms"]}
    network = {row["method"]["name"]: row for row in parts["transformer"]}
    return {
        "picture": "distances to a known target",
        "kept": {label: path(named[name]) for name, label in PATHS.items()},
        "kept_target": named["FlowRL, beta 5, raw, group"]["target"],
        "over_steps": {
            name: {"steps": terms[name]["steps"], "variation": middle(terms[name], "variation")}
            for name in CURVES
        },
        "terms": at_the_end(parts["terms"], "variation"),
        "strings": at_the_end(parts["strings"], "variation"),
        "strings_right": at_the_end(parts["strings"], "effective"),
        "network": {name: path(network[name]) for name in NETWORK},
        "network_target": network["raw, group"]["target"],
    }


def middle(result: Result, name: str) -> list[float]:
    """The mean over seeds at each measurement."""
    return [sum(values) / len(values) for values in zip(*result["curves"][name], strict=True)]


def path(result: Result) -> dict[str, list[float]]:
    """Reward and effective number, from the reference on."""
    return {name: middle(result, name) for name in ("reward", "effective")}


def at_the_end(results: list[Result], name: str) -> dict[str, list[float | None]]:
    """The measure at the end by method: its mean, and half the width of its interval; None with one seed."""
    found = {result["method"]["name"]: interval(last(result, name)) for result in results}
    return {method: [mean, None if half != half else half] for method, (mean, half) in found.items()}
