"""Write a job's page: one HTML file with its data, style, scripts and the plotting library in it."""

from __future__ import annotations

import html
import json
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any


def render(found: dict[str, Any]) -> str:
    """Return the page of what `flashpatch.verify.job.collect.job` returns."""
    parts = {
        "title": html.escape(found["run"]),
        "style": asset("page.css"),
        "data": _as_script(found),
        "licence": asset("chart.LICENSE.md").replace("--", "- -"),
        "library": asset("chart.umd.min.js").rpartition("//# sourceMappingURL=")[0],
        "charts": asset("charts.js"),
        "script": asset("page.js"),
    }
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], asset("page.html"))


@cache
def said() -> dict[str, Any]:
    """Return the sentences, charts and metrics of ``said.toml``."""
    return tomllib.loads(asset("said.toml"))


def asset(name: str) -> str:
    return (resources.files("flashpatch.verify.job") / "assets" / name).read_text(encoding="utf-8")


def _as_script(data: dict[str, Any]) -> str:
    """Return JSON that no HTML parser takes for markup: ``<``, ``>``, ``&`` and line separators are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})
