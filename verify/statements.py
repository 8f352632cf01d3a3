"""Say what each name did for a job, as the family states it, each statement with what was seen of it."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from flashpatch import conditions
from flashpatch.conditions import Facts
from flashpatch.ledger.runs import Row
from flashpatch.verify.due import Situation

DUE = "the patches that were due were called"
_ENDINGS = ("off", "problem", "refused")


@dataclass(frozen=True)
class Stated:
    """Hold one statement: what shows it, empty if nothing does, and why the job's settings ask for it, empty if they do not."""

    family: str
    what: str
    seen: str
    asked: str


def of_job(
    families: Collection[str],
    rows: Sequence[Row],
    found: Sequence[Situation],
    dues: Mapping[str, tuple[int, int]],
) -> Iterator[Stated]:
    """Yield the statements of these families. ``dues``: of a family, how many things were due and how many of them were seen.

    Of a family that was due nothing, and of which nothing is seen, nothing is yielded."""
    values, calls = noted(rows), defaultdict[str, list[int]](list)
    for row in rows:
        for id, patch in row.parts[0].items():
            calls[id] += [patch["calls"]] if patch["calls"] else []
    for family in sorted(families):
        wanted, shown = dues.get(family, (0, 0))
        options = next((at.options[family] for at in found if family in at.options), {})
        facts = Facts(options, anywhere={id for id in calls if calls[id]}, noted=values)
        told = [
            Stated(family, what, _seen(shown, facts, values, calls), _asked(asked, facts))
            for what, (shown, *asked) in table().get(family, {}).items()
        ]
        if not wanted and not any(one.seen for one in told):
            continue
        yield from (one for one in told if one.seen or one.asked)
        if wanted:
            yield Stated(family, DUE, f"{shown} of {wanted}" * (shown > 0), "they were due")


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """Return what the families state, see ``statements.toml``."""
    return tomllib.loads((resources.files("flashpatch.patches") / "statements.toml").read_text())


def noted(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what the processes noted, unless 0 or empty, by name; a mapping's values also by ``note.key``, a text by ``note.text``."""
    found = defaultdict[str, list[Any]](list)
    for row in rows:
        for name, value in row.notes.items():
            within = {value: value} if isinstance(value, str) else value if isinstance(value, dict) else {}
            for key, one in ((name, value), *((f"{name}.{key}", one) for key, one in within.items())):
                if one:
                    found[key].append(one)
    return dict(found)


def remarks(who: str, row: Row) -> Iterator[tuple[str, str]]:
    """Yield a word and a sentence per note of a process that says what is ``"off"``, ``"refused"`` or a ``"problem"``."""
    for name, value in row.notes.items():
        if value and (what := name.rpartition("_")[2]) in _ENDINGS:
            yield what, f"{who} noted {name}: {value}"


def _asked(asked: Sequence[str], facts: Facts) -> str:
    return next((conditions.words(one) or "it is on" for one in asked if conditions.hold(one, facts)), "")


def _seen(
    condition: str, facts: Facts, values: Mapping[str, list[Any]], calls: Mapping[str, list[int]]
) -> str:
    """Return what shows a statement: the largest value noted, or the calls; empty if its condition does not hold."""
    if not conditions.hold(condition, facts):
        return ""
    found = []
    for name in (value for term in conditions.parse(condition) for value in term.values):
        if numbers := [one for one in values.get(name, ()) if type(one) in (int, float)]:
            found.append(f"{name} {max(numbers):g}")
        elif name in values:
            texts = sorted({one for one in values[name] if isinstance(one, str) and len(one) < 40})
            found.append(" ".join([name.partition(".")[0], *texts[:3]]))
        elif calls.get(name):
            found.append(f"{name} called {sum(calls[name])} times in {len(calls[name])}")
    return ", ".join(found)
