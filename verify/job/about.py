"""What job it was: its command, names with options, versions and machines, as its processes wrote them."""

from __future__ import annotations

from collections.abc import Iterable

from flashpatch.ledger import files
from flashpatch.ledger.runs import Row


def about(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return what to show above a job, label and text; a line of which nothing is known is left out."""
    rows = sorted(rows, key=lambda row: (row.first_written or float("inf"), row.pid))
    versions: dict[str, list[str]] = {}
    names: dict[str, None] = {}
    for row in rows:
        for package, version in row.versions.items():
            if version not in versions.setdefault(package, []):
                versions[package].append(version)
        for family, on in row.on.items():
            names[files.name_and_options(family, on)] = None
    lines = {
        "command": next((row.argv0 for row in rows if row.argv0), ""),
        "names": ", ".join(names),
        "versions": ", ".join(
            f"{package} {' and '.join(found)}" for package, found in sorted(versions.items())
        ),
        "machines": ", ".join(dict.fromkeys(row.host for row in rows)),
    }
    return [(what, text) for what, text in lines.items() if text]
