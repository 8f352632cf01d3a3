"""Say which patches were due, and which were called, in the jobs that tests ran: ``pytest --seen-live=FILE``.

The file is JSON: id of a patch to ``due`` and ``live``, names of tests or fixtures in whose ledgers it was due, or due and
called. Files of several lanes are joined into one table by ``python tests/support/seen_live.py FILE...``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seen-live", metavar="FILE", help="write which patches were due and called in the tests' jobs"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--seen-live")
    if target:
        base = session.config._tmp_path_factory.getbasetemp()
        Path(target).write_text(json.dumps(seen(base), indent=1, sort_keys=True))


def seen(base: Path) -> dict[str, dict[str, list[str]]]:
    """Return what the ledgers below a directory show; a job is named by the part of its path that follows ``base``."""
    from flashpatch.ledger import runs

    found: dict[str, dict[str, set[str]]] = {}
    for folder in sorted({path.parent for path in base.rglob("row-*.json")}):
        run = runs.read_run(folder)
        job = folder.relative_to(base).parts[0].rstrip("0123456789_")
        due, called = _of_run(run.rows if run is not None else [])
        for id in due:
            kinds = found.setdefault(id, {"due": set(), "live": set()})
            kinds["due"].add(job)
            kinds["live"] |= {job} if id in called else set()
    return {id: {kind: sorted(jobs) for kind, jobs in kinds.items()} for id, kinds in found.items()}


def table(files: Iterable[Path]) -> str:
    """Return a table in Markdown of all patches: when evidence is due, and in which jobs it was seen."""
    from flashpatch import registry
    from flashpatch.evidence import explain, may_be_due

    live: dict[str, set[str]] = {}
    for file in files:
        for id, kinds in json.loads(file.read_text()).items():
            live.setdefault(id, set()).update(kinds["live"])
    patches = registry.patches()
    lines = ["| patch | due | seen live in |", "| --- | --- | --- |"]
    lines += [
        f"| `{id}` | {explain(patch)} | {', '.join(sorted(live.get(id, ())))} |"
        for id, patch in patches.items()
    ]
    due = sum(map(may_be_due, patches.values()))
    shown = sum(bool(live.get(id)) for id in patches)
    return "\n".join(
        [*lines, "", f"{due} of {len(patches)} are due in some job; {shown} were seen live in these."]
    )


def _of_run(rows: list) -> tuple[set[str], set[str]]:
    """Return ids that were due somewhere in a run, and ids that were called."""
    from flashpatch import evidence, registry
    from flashpatch.verify import due as due_of

    patches, due, called = registry.patches(), set(), set()
    for row, at in zip(rows, due_of.situations(rows, patches), strict=True):
        known = [
            patches[id] for id, one in row.patches.items() if id in patches and one["state"] != "skipped"
        ]
        due |= {one.patch.id for one in evidence.due(known, row.roles, at.options, at.happened, at.facts)}
        called |= due_of.called(row)
    return due, called


if __name__ == "__main__":
    print(table(map(Path, sys.argv[1:])))
