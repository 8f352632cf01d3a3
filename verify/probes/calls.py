"""Judge whether the ledger counted what the processes of a probe must have called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from flashpatch.ledger.runs import Row
from flashpatch.verify import due
from flashpatch.verify.probes import jobs
from flashpatch.verify.proof import Proof


def counted(found: Sequence[Row], family: str) -> Iterator[Proof]:
    """Judge what was counted of a built-in family, of the frameworks of which a patch was called.

    ``settings.toml`` has by role the last parts of the ids of patches that are on the probe's way; of the others `live.judge`
    says whether they were due, and called."""
    calls, idle = Counter[str](), list[str]()
    for row in found:
        calls.update({id: entry["calls"] for id, entry in row.parts[0].items() if entry["calls"]})
    for of in sorted({id.rpartition(".")[0] for id in calls if id.startswith(f"{family}.")}):
        for role, names in jobs.given()["taken"].get(of, {}).items():
            called = set().union(*(due.called(row) for row in found if role in row.roles))
            idle += [f"{of}.{name} by any {role}" for name in names if f"{of}.{name}" not in called]
    said = f"{calls.total()} calls of {len(calls)} patches"
    what = "the ledger counted what the probe's processes called"
    if family in {of.partition(".")[0] for of in jobs.given()["taken"]}:
        said = f"never called: {', '.join(idle)}" if idle else said
        yield Proof(family, what, bool(calls) and not idle, said)
