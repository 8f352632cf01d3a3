"""Find engines and fleets at rest whose processes hold different versions of the policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from flashpatch.ledger.runs import Row
from flashpatch.record import Patch
from flashpatch.verify import due

FAMILY = "fp8"
"""The family that updates weights and notes their version."""


def splits(rows: Sequence[Row], patches: Mapping[str, Patch]) -> list[str]:
    """Return a sentence per engine, and one for the fleet, that holds several policies, with its ranks.

    The ranks of an engine are workers whose rows name one engine, on any host; where none does, workers of one front end, or of
    one core, whose ranks differ (``dp`` is among them). Their versions, which count updates, must be equal. Engines are compared by the step of verl's trainer that was sent last, and only those that live: one that was
    started later has counted fewer updates, and one that was killed was sent fewer steps. An engine that was there at the last
    update, takes steps and was sent none is behind too. Where an update is open, nothing is said."""
    workers = [row for row in rows if "worker" in row.roles and "policy_version" in row.notes]
    cores = {(row.host, row.pid): row.ppid for row in rows if "engine-core" in row.roles}
    found = []
    for front in _groups(
        workers, lambda row: row.engine or (row.host, cores.get((row.host, row.ppid), row.ppid))
    ):
        for ranks in [front] if _is_one_engine(front) else _groups(front, lambda row: (row.host, row.ppid)):
            if _is_one_engine(ranks):
                what = "the ranks of one engine hold several policy versions"
                found += _split(ranks, "policy_version", what)
    living = [row for row in rows if "worker" in row.roles and row.alive is not False]
    sent = [row for row in living if row.notes.get("sync_step") is not None]
    fresh = due.opened_since(rows)
    behind = [row for row in living if row not in sent and (row.host, row.pid) not in fresh]
    behind = [row for row in behind if sent and due.has_stepped(row, patches)]
    found += _split([*sent, *behind], "sync_step", "engines of one job hold the policies of several steps")
    return found


def _groups(rows: Sequence[Row], of: Callable[[Row], Hashable]) -> list[list[Row]]:
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(of(row), []).append(row)
    return list(found.values())


def _is_one_engine(rows: Sequence[Row]) -> bool:
    """Whether no two processes have the same rank."""
    return len({str(sorted(row.rank.items())) for row in rows}) == len(rows)


def _split(rows: Sequence[Row], name: str, what: str) -> Iterator[str]:
    held = {row.notes.get(name) for row in rows}
    if len(held) < 2 or any(row.notes.get("policy_state", "ready") != "ready" for row in rows):
        return
    who: dict[Any, list[str]] = {value: [] for value in sorted(held, key=lambda one: (one is not None, one))}
    for row in rows:
        ranks = ", ".join(f"{key} {value}" for key, value in row.rank.items() if key != "local_rank")
        who[row.notes.get(name)].append(f"{ranks or 'worker'} ({row.host}:{row.pid})")
    texts = (f"{'none' if value is None else value} in {', '.join(mine)}" for value, mine in who.items())
    yield f"{what}: {'; '.join(texts)}. Send a complete update to all of them"
