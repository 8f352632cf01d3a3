"""Judge whether the ledger counted what the processes of a probe must have called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flashpatch import ledger
from flashpatch.ledger.runs import Row
from flashpatch.settings import selections
from flashpatch.verify import due
from flashpatch.verify.proof import Proof


def rows(nonce: str) -> list[Row]:
    """Return the rows that the probe's processes wrote."""
    return [row for run in ledger.read() if run.id == nonce for row in run.rows]


def options(family: str) -> Mapping[str, Any]:
    """Return the options with which a family is probed."""
    return selections.from_environment(selections.NOTHING).choices[family].options


def counted(nonce: str, of: str, taken: Mapping[str, Sequence[str]]) -> Proof:
    """Judge what was counted under the nonce.

    Args:
        nonce: of the probe.
        of: family and framework, such as ``grpo.verl``.
        taken: by role the last parts of the ids of patches that are on the probe's way, beside those that are due by their
            records.
    """
    found, family = rows(nonce), of.partition(".")[0]
    idle = [
        f"{names} by any {role}"
        for role, more in taken.items()
        for names in due.not_called(
            [row for row in found if role in row.roles], found, of, role, options(family), more
        )
    ]
    calls = Counter[str]()
    for row in found:
        calls.update({id: entry["calls"] for id, entry in row.patches.items()})
    evidence = f"{calls.total()} calls of {sum(map(bool, calls.values()))} patches"
    what = "the ledger counted what the probe's processes called"
    return Proof(family, what, not idle, f"never called: {', '.join(idle)}" if idle else evidence)
