"""Read the conditions of a patch's evidence, such as ``"precision=int8 called=fp8.vllm.worker_sleep"``.

A condition is a list of terms that must all hold, each ``KEY=VALUE`` or ``KEY!=VALUE``; ``VALUE`` may be several, joined by
``|``, of which one must match. These keys ask for what a process or its job did, any other is an option of the patch's family:

- ``called``: a patch that was called in this process;
- ``anywhere``: a patch that was called in some process of the job. What is due by such a term is due once in the job;
- ``child``: a role of a process that this one started, e.g. ``engine-core``;
- ``uses``: a framework of which a patch was called in this process;
- ``noted``: a note that some process of the job wrote, or ``note.key`` of one, that is neither 0 nor empty."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

JOB = "anywhere"
"""The key of terms that speak of the whole job."""

_TERM = re.compile(r"(?P<key>\w+)(?P<negated>!?)=(?P<values>[^\s|=]+(?:\|[^\s|=]+)*)")
_CLAUSES = {
    "called": ("{} was called", "{} was not called"),
    JOB: ("{} was called in this job", "{} was not called in this job"),
    "child": ("it started a process of role {}", "it started no process of role {}"),
    "uses": ("it used {}", "it did not use {}"),
    "noted": ("{} was noted", "{} was not noted"),
}
"""What a term says, and what it says negated, by its key; others are options."""


@dataclass(frozen=True)
class Term:
    """Hold one ``KEY=VALUE|VALUE`` of a condition; ``negated``: ``!=``."""

    key: str
    values: tuple[str, ...]
    negated: bool


@dataclass(frozen=True)
class Facts:
    """Hold what conditions ask for.

    Attributes:
        options: options of the patch's family, with their values.
        called: ids of patches that were called in the process.
        anywhere: ids of patches that were called in some process of the job.
        child: roles of processes that the process started.
        uses: frameworks of which a patch was called in the process.
        noted: names of notes of the job."""

    options: Mapping[str, Any] = field(default_factory=dict)
    called: Collection[str] = ()
    anywhere: Collection[str] = ()
    child: Collection[str] = ()
    uses: Collection[str] = ()
    noted: Collection[str] = ()


@functools.cache
def parse(text: str) -> tuple[Term, ...]:
    """Return the terms of a condition; none for an empty one. Raises ValueError if a word is no term."""
    found = []
    for word in text.split():
        match = _TERM.fullmatch(word)
        if match is None:
            raise ValueError(f"condition {text!r}: {word!r} is not of the form KEY=VALUE")
        found.append(Term(match["key"], tuple(match["values"].split("|")), bool(match["negated"])))
    return tuple(found)


def options(text: str) -> tuple[str, ...]:
    """Return the names of the options that a condition asks for."""
    return tuple(term.key for term in parse(text) if term.key not in _CLAUSES)


def hold(text: str, facts: Facts) -> bool:
    """Whether all terms of a condition hold."""
    return all(_holds(term, facts) != term.negated for term in parse(text))


def words(text: str) -> str:
    """Return a condition as a clause, such as ``precision is int8 and fp8.vllm.worker_sleep was called``; empty for none."""
    return " and ".join(map(_words, parse(text)))


def _holds(term: Term, facts: Facts) -> bool:
    if term.key in _CLAUSES:
        return not set(term.values).isdisjoint(getattr(facts, term.key))
    value = facts.options.get(term.key)
    written = [_plain(item) for item in value] if isinstance(value, (list, tuple)) else [_plain(value)]
    return not set(term.values).isdisjoint(written)


def _words(term: Term) -> str:
    said, denied = _CLAUSES.get(term.key, (f"{term.key} is {{}}", f"{term.key} is not {{}}"))
    return (denied if term.negated else said).format(" or ".join(term.values))


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
