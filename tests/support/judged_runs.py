"""Judge, as ``flashpatch-verify --live`` does, every ledger that real jobs left below directories: ``python judged_runs.py DIR...``

Tests leave theirs in pytest's temporary directories. Prints how many runs had a patch called, how many of them give no
alarm, in how many combinations of families and roles, and the first alarm of each other one: of a test that breaks something
on purpose it must be what that test broke.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from flashpatch import registry
from flashpatch.ledger import runs
from flashpatch.verify.live import judge


def judged(bases: Iterable[Path]) -> tuple[dict[Path, str], set[tuple[frozenset[str], tuple[str, ...]]]]:
    """Return the first alarm of each run, empty if there is none, and the families and roles of those without."""
    patches, found, kinds = registry.patches(), {}, set()
    for folder in sorted({path.parent for base in bases for path in base.rglob("row-*.json")}):
        run = runs.read_run(folder)
        if run is None or not any(one["calls"] for row in run.rows for one in row.patches.values()):
            continue
        problems = judge(run, patches).problems
        found[folder] = problems[0] if problems else ""
        if not problems:
            roles = tuple(sorted(role for row in run.rows for role in row.roles))
            kinds.add((frozenset(family for row in run.rows for family in row.on), roles))
    return found, kinds


if __name__ == "__main__":
    alarms, clean = judged(map(Path, sys.argv[1:]))
    for place, alarm in alarms.items():
        if alarm:
            print(f"{place}: {alarm}")
    quiet = sum(not alarm for alarm in alarms.values())
    print(f"{len(alarms)} runs, {quiet} without alarm, in {len(clean)} combinations of families and roles")
