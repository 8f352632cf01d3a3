"""Check what processes wrote, once, where it is read: types, sizes, and letters that a terminal would obey.

`loads` escapes a whole value: what it returns holds no control characters, no lone surrogates, no number that is not finite,
and is nested at most `_DEEPEST` times, so that whatever shows it need not look again. A row or an expected row that does not
fit is refused with a reason. An event whose known facts do not fit is none.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, get_args

from flashpatch.record import StateWord

BROKEN = (OSError, ValueError)
"""What reading a damaged file may raise; the functions here raise ValueError alone."""

_STATES = frozenset(get_args(StateWord))
_DEEPEST = 10
_LARGEST = 1 << 63  # of any number
_LAST_PID = (1 << 31) - 1
_LAST_TIME = 1e11  # seconds since 1970: the year 5138


def loads(content: bytes | str) -> Any:
    """Return a value of JSON that is fit to be shown, see the module. Raises ValueError."""
    try:
        return _clean(json.loads(content))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def text(value: str) -> str:
    """Return a text with its unprintable characters escaped, and line breaks as spaces."""
    if value.isprintable():
        return value
    return "".join(letter if letter.isprintable() else _visible(letter) for letter in value)


def row(value: Any) -> dict[str, Any]:
    """Return the fields of a `flashpatch.ledger.runs.Row`, of a value that `loads` returned.

    Raises:
        ValueError: a field is missing, or is not what it must be.
    """
    found = _fields(value, _ROW, "the row")
    return found | {name: check(value[name], name) for name, check in _LATER.items() if name in value}


def expected(value: Any) -> dict[str, Any]:
    """Return the fields of a `flashpatch.ledger.runs.Expected`. Raises ValueError as `row` does."""
    return _fields(value, _EXPECTED, "the expected row")


def event(line: bytes | str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is none, as the last one of a killed process may be."""
    try:
        value = loads(line)
        found = _fields(value, {"t": _time, "event": _text}, "the event")
        return found | {
            name: checked
            for name, fact in value.items()
            if name not in found and (checked := _fact(name, fact)) is not None
        }
    except ValueError:
        return None


def _clean(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that is fit to be shown; what is nested too deeply is ``"..."``."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value if -_LARGEST < value < _LARGEST and not math.isnan(value) else None
    if depth == _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {text(key): _clean(inner, depth + 1) for key, inner in value.items()}
    return [_clean(inner, depth + 1) for inner in value]


def _visible(letter: str) -> str:
    if letter.isspace() or unicodedata.category(letter) == "Zs":
        return " "
    return f"\\u{ord(letter):04x}"


def _of(value: Any, kind: Any, name: str) -> Any:
    """Return a value of this type; True and False are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name[:60]} is {type(value).__name__}")
    return value


def _fields(value: Any, checks: Mapping[str, Callable[[Any, str], Any]], name: str) -> dict[str, Any]:
    """Return the values of a mapping under these names, checked."""
    absent = [repr(key) for key in checks if key not in _of(value, dict, name)]
    if absent:
        raise ValueError(f"no key {', '.join(absent)}: it is of another version of FlashPatch")
    return {key: check(value[key], key) for key, check in checks.items()}


def _fact(name: str, value: Any) -> Any:
    """Return what an event says under a name; None if it says nothing."""
    check = _FACTS.get(name)
    if check is None and name.startswith(("timing_s/", "sync/")):
        check = _measured
    return value if check is None or value is None else check(value, name)


def _text(value: Any, name: str) -> str:
    return _of(value, str, name)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_text(one, name) for one in _of(value, list, name))


def _text_or_none(value: Any, name: str) -> str | None:
    return None if value is None else _text(value, name)


def _named_texts(value: Any, name: str) -> dict[str, str]:
    return {key: _text(one, f"{name}.{key}") for key, one in _mapping(value, name).items()}


def _mapping(value: Any, name: str) -> dict[str, Any]:
    return _of(value, dict, name)


def _measured(value: Any, name: str) -> float | int:
    return _of(value, (int, float), name)


def _measurements(value: Any, name: str) -> dict[str, float | int]:
    """Return names to numbers, without those that are not finite."""
    return {
        key: _measured(one, f"{name}.{key}") for key, one in _mapping(value, name).items() if one is not None
    }


def _count(value: Any, name: str) -> int:
    return _between(_of(value, int, name), 0, _LARGEST, f"{name} is no count")


def _counts(value: Any, name: str) -> dict[str, int]:
    return {key: _count(one, f"{name}.{key}") for key, one in _mapping(value, name).items()}


def _time(value: Any, name: str) -> float:
    return float(_between(_measured(value, name), 0, _LAST_TIME, f"{name} is no time"))


def _pid(value: Any, name: str) -> int:
    return _between(_of(value, int, name), int(name != "ppid"), _LAST_PID + 1, f"{name} is no process's")


def _between(value: Any, least: float, end: float, problem: str) -> Any:
    if least <= value < end:
        return value
    raise ValueError(problem)


def _ranks(value: Any, name: str) -> dict[str, Any]:
    return {
        key: str(rank) if isinstance(rank, (list, dict)) else rank
        for key, rank in _mapping(value, name).items()
    }


def _notes(value: Any, name: str) -> dict[str, Any]:
    for key in ("policy_version", "drafter_version", "updates", "steps"):
        if key in _mapping(value, name):
            _count(value[key], f"{name}.{key}")
    return value


def _patches(value: Any, name: str) -> dict[str, Any]:
    return {id: _patch(patch) for id, patch in _mapping(value, name).items()}


def _patch(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"state": "", "detail": "", "calls": None, "target": "", "tested": None}
    for key, one in _mapping(value, "a patch").items():
        if key in _OF_A_PATCH and one is not None:
            found[key] = _of(one, _OF_A_PATCH[key], key)
    if found["state"] not in _STATES:
        raise ValueError(f"a patch is in the state {found['state']!r}")
    _count(found["calls"], "calls")
    return found


def _on(value: Any, name: str) -> dict[str, Any]:
    choice = {"name": _text, "options": _mapping}
    return {family: _fields(one, choice, name) for family, one in _mapping(value, name).items()}


_OF_A_PATCH = {"state": str, "detail": str, "calls": int, "target": str, "tested": bool}
_PROCESS = {"host": _text, "pid": _pid, "start": _text}
_EXPECTED = {**_PROCESS, "roles": _texts, "families": _texts, "by": _pid}
_ROW: Mapping[str, Callable[[Any, str], Any]] = {
    **_PROCESS,
    **dict.fromkeys(("argv0", "written"), _text),
    **{"ppid": _pid, "roles": _texts, "rank": _ranks, "versions": _named_texts, "patches": _patches},
    **{"notes": _notes, "error": _text_or_none},
}
_LATER = {"run": _text, "first_written": _time, "title": _text, "on": _on}
"""What rows of earlier versions have not."""

_FACTS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(
        ("n", "version", "buckets", "rss_bytes", "failed", "repeats", "repeated", "events", "lost"), _count
    ),
    **dict.fromkeys(("samples", "drafted", "accepted"), _count),
    **dict.fromkeys(("seconds", "load_seconds", "commit_seconds", "acceptance_length"), _measured),
    **dict.fromkeys(("outcome", "role"), _text),
    "values": _measurements,
    "arms": _counts,
    "by": _counts,
}
"""Facts of events that are computed with, to what checks them. Others are shown as they are."""
