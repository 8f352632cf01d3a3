"""Say which patches must have been observed live in a process, from their records and from what happened."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashpatch import conditions
from flashpatch.conditions import Facts
from flashpatch.record import WHEN_DUE, Patch

EVERYTHING = frozenset({"install", "update", "step"})
"""What happens in a process that loads a model, takes steps and gets new weights."""

_HAPPENED = {
    "install": "it acts in this role from the start",
    "update": "there were updates",
    "step": "there were steps",
}
"""By ``evidence``: why it is due by now, as the clause behind "though"."""


@dataclass(frozen=True)
class Due:
    """Hold what is due because of one patch.

    Attributes:
        patch: its record.
        alternatives: ids of which one must have been called; the patch itself is the first.
        reason: why, as the clause behind "though": ``there were updates and precision is int8``.
        in_job: whether one process of the job is enough."""

    patch: Patch
    alternatives: tuple[str, ...]
    reason: str
    in_job: bool = field(default=False)

    def shown_by(self, called: Collection[str]) -> bool:
        """Whether calls of these patches are the evidence."""
        return any(id in called for id in self.alternatives)

    def __str__(self) -> str:
        return " or ".join(self.alternatives)


def due(
    records: Iterable[Patch],
    roles: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
    happened: Collection[str],
    facts: Facts,
) -> Iterator[Due]:
    """Yield what must have been observed in a process that carries these patches.

    Without roles it is not known what the process is for, so nothing of it is due; `Due.in_job` concerns the job, whatever
    the roles are. Each family's options are filled into ``facts``; ``happened`` are kinds of `EVERYTHING`."""
    for patch in records:
        in_job = any(term.key == conditions.JOB for term in conditions.parse(patch.when))  # due once in it
        acts_here = in_job or (set(roles) & patch.scope if patch.scope else roles)
        is_time = may_be_due(patch) and patch.evidence in ("optional", *happened)
        if not (acts_here and is_time):
            continue
        if conditions.hold(patch.when, replace(facts, options=options.get(patch.family, {}))):
            yield Due(patch, (patch.id, *patch.one_of), _reason(patch), in_job)


def may_be_due(patch: Patch) -> bool:
    """Whether there is a job in which evidence of the patch is due."""
    return patch.evidence != "fault" and (patch.evidence != "optional" or bool(patch.when))


def explain(patch: Patch) -> str:
    """Return when evidence of a patch is due, and what shows it: what stands behind "due" in a sentence."""
    condition = conditions.words(patch.when)
    if not condition:
        text = WHEN_DUE[patch.evidence]
    elif patch.evidence == "optional":
        text = f"if {condition}"
    else:
        text = f"{WHEN_DUE[patch.evidence]}, if {condition}"
    return f"{text}; {' or '.join(patch.one_of)} shows it too" if patch.one_of else text


def _reason(patch: Patch) -> str:
    condition = conditions.words(patch.when)
    if patch.evidence == "optional":
        return condition
    return f"{_HAPPENED[patch.evidence]} and {condition}" if condition else _HAPPENED[patch.evidence]
