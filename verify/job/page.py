"""Write a job's page: one HTML file with its data, style, scripts and the plotting library in it."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

_PACKED = ("updates", "syncs")
"""Lists of equal dictionaries that may be long: their names are written once."""


def render(found: dict[str, Any]) -> str:
    """Return the page of what `flashpatch.verify.job.collect.job` returns."""
    data = {**found, **{name: _packed(found[name]) for name in _PACKED}}
    parts = {
        "title": html.escape(found["run"]),
        "style": asset("page.css"),
        "data": _as_script(data),
        "licence": asset("chart.LICENSE.md").replace("--", "- -"),
        "library": asset("chart.umd.min.js").rpartition("//# sourceMappingURL=")[0],
        "charts": asset("charts.js"),
        "script": asset("page.js"),
    }
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], asset("page.html"))


def asset(name: str) -> str:
    return (resources.files("flashpatch.verify.job") / "assets" / name).read_text(encoding="utf-8")


def _packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = list(rows[0]) if rows else []
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]}


def _as_script(data: dict[str, Any]) -> str:
    """Return JSON that no HTML parser takes for markup: ``<``, ``>``, ``&`` and line separators are escaped."""
    text = json.dumps(data, separators=(",", ":"), default=repr, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
