"""Judge whether the ledger counted what the processes of a probe must have called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flashpatch import evidence, ledger, registry
from flashpatch.conditions import Facts
from flashpatch.ledger.runs import Row
from flashpatch.settings import selections
from flashpatch.verify import due
from flashpatch.verify.proof import Proof


def rows(nonce: str) -> list[Row]:
    return [row for run in ledger.read() if run.id == nonce for row in run.rows]


def options(family: str) -> Mapping[str, Any]:
    """Return the options with which a family is probed."""
    return selections.from_environment(selections.NOTHING).choices[family].options


def counted(nonce: str, of: str, taken: Mapping[str, Sequence[str]]) -> Proof:
    """Judge what was counted of a family and framework, such as ``grpo.verl``, under the nonce.

    ``taken`` has by role the last parts of the ids of patches that are on the probe's way, beside those due by their records."""
    found, (family, _, framework) = rows(nonce), of.partition(".")
    records = [one for one in registry.family(family).patches if one.framework == framework]
    given, happened = {family: options(family)}, evidence.EVERYTHING - {"install"}
    anywhere, children = frozenset().union(*map(due.called, found)), due.children(found)
    idle = []
    for role, more in taken.items():
        acting = [row for row in found if role in row.roles]
        mine = frozenset().union(*map(due.called, acting))
        child = set().union(*(children.get((row.host, row.pid), ()) for row in acting))
        facts = Facts(called=mine, anywhere=anywhere, child=child, uses={framework})
        steps = evidence.due(records, {role}, given, happened, facts)
        wanted = [one.alternatives for one in steps if one.patch.scope & {role}]
        wanted += [(f"{of}.{name}",) for name in more]
        missing = dict.fromkeys(tuple(sorted(ids)) for ids in wanted if mine.isdisjoint(ids))
        idle += [f"{' or '.join(ids)} by any {role}" for ids in missing]
    calls = Counter[str]()
    for row in found:
        calls.update({id: entry["calls"] for id, entry in row.patches.items()})
    said = f"{calls.total()} calls of {sum(map(bool, calls.values()))} patches"
    what = "the ledger counted what the probe's processes called"
    return Proof(family, what, not idle, f"never called: {', '.join(idle)}" if idle else said)
