"""Write a job's page: one HTML file with its data, style, scripts and the plotting library in it."""

from __future__ import annotations

import html
import json
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

_NO_MARKUP = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""What no HTML parser may take for markup, escaped as JSON has it."""


def render(found: dict[str, Any]) -> str:
    """Return the page of what `flashpatch.verify.job.collect.job` returns."""
    parts = {
        "title": html.escape(found["run"]),
        "style": asset("page.css"),
        "data": json.dumps(found, separators=(",", ":"), allow_nan=False).translate(_NO_MARKUP),
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
