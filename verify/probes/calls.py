"""Judge whether the ledger counted what the processes of a probe must have called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flashpatch import ledger
from flashpatch.ledger.runs import Row
from flashpatch.settings import selections
from flashpatch.verify import due
from flashpatch.verify.probes import jobs
from flashpatch.verify.proof import Proof


def rows(nonce: str) -> list[Row]:
    return [row for run in ledger.read() if run.id == nonce for row in run.rows]


def options(family: str) -> Mapping[str, Any]:
    """Return the options with which a family is probed."""
    return selections.from_environment(selections.NOTHING).choices[family].options


def counted(nonce: str, of: str) -> Proof:
    """Judge what was counted of a family and framework, such as ``grpo.verl``, under the nonce.

    ``settings.toml`` has by role the last parts of the ids of patches that are on the probe's way; of the others the probe's runner
    says whether they were due, and called."""
    found, idle = rows(nonce), list[str]()
    for role, names in jobs.given()["taken"][of].items():
        called = set().union(*(due.called(row) for row in found if role in row.roles))
        idle += [f"{of}.{name} by any {role}" for name in names if f"{of}.{name}" not in called]
    calls = Counter[str]()
    for row in found:
        calls.update({id: entry["calls"] for id, entry in row.parts[0].items()})
    said = f"{calls.total()} calls of {sum(map(bool, calls.values()))} patches"
    what = "the ledger counted what the probe's processes called"
    return Proof(of.partition(".")[0], what, not idle, f"never called: {', '.join(idle)}" if idle else said)
