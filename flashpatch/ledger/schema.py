"""Check what processes wrote, once, where it is read: types, sizes, and letters that a terminal would obey.

A row or an expected row that does not fit is refused with a reason. An event whose known facts do not fit is none.
What passes holds no control characters, no lone surrogates, no number that is not finite, and is nested at most
`_DEEPEST` times, so that whatever shows it need not look again.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, get_args

from flashpatch.record import StateWord

BROKEN = (OSError, ValueError, RecursionError)
"""What reading a damaged file may raise; the functions here raise ValueError alone."""

_STATES = frozenset(get_args(StateWord))
_DEEPEST = 8
_LARGEST = 1 << 63  # of any number
_LAST_PID = (1 << 31) - 1
_LAST_TIME = 1e11  # seconds since 1970: the year 5138
_OF_A_PATCH = {"state": str, "detail": str, "calls": int, "target": str, "tested": bool}


def loads(content: bytes | str) -> Any:
    """Return the value of JSON. Raises ValueError, also for text that is nested too deeply to be read."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def text(value: str) -> str:
    """Return a text with its unprintable characters escaped, and line breaks as spaces."""
    if value.isprintable():
        return value
    return "".join(letter if letter.isprintable() else _visible(letter) for letter in value)


def row(value: Any) -> dict[str, Any]:
    """Return the fields of a `flashpatch.ledger.runs.Row`.

    Raises:
        ValueError: a field is missing, or is not what it must be.
    """
    value = _mapping(value, "the row")
    notes = {text(name): clean(note) for name, note in _field(value, "notes", dict).items()}
    for name in ("policy_version", "drafter_version", "updates", "steps"):
        if name in notes:
            _count(notes[name], f"notes.{name}")
    return {
        **_identity(value),
        "ppid": _pid(value, "ppid", least=0),
        "argv0": _text(value, "argv0"),
        "roles": _texts(value, "roles"),
        "rank": {text(name): _scalar(rank) for name, rank in _field(value, "rank", dict).items()},
        "versions": {
            text(name): text(_of(version, str, f"versions.{name}"))
            for name, version in _field(value, "versions", dict).items()
        },
        "patches": {text(id): _patch(patch) for id, patch in _field(value, "patches", dict).items()},
        "notes": notes,
        "error": None if _field(value, "error", object) is None else _text(value, "error"),
        "written": _text(value, "written"),
        "run": _text(value, "run") if "run" in value else "",
        "first_written": _time(value.get("first_written", 0.0), "first_written"),
        "title": _text(value, "title") if "title" in value else "",
        "on": {
            text(family): _choice(choice) for family, choice in _mapping(value.get("on", {}), "on").items()
        },
    }


def expected(value: Any) -> dict[str, Any]:
    """Return the fields of a `flashpatch.ledger.runs.Expected`. Raises ValueError as `row` does."""
    value = _mapping(value, "the expected row")
    return {
        **_identity(value),
        "roles": _texts(value, "roles"),
        "families": _texts(value, "families"),
        "by": _pid(value, "by"),
    }


def event(line: bytes | str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is none, as the last one of a killed process may be."""
    try:
        value = _mapping(loads(line), "the event")
        name, time = text(_of(value["event"], str, "event")), _time(value["t"], "t")
        facts = {
            text(key): _fact(text(key), fact) for key, fact in value.items() if key not in ("event", "t")
        }
    except (ValueError, KeyError):
        return None
    return {"t": time, "event": name, **{key: fact for key, fact in facts.items() if fact is not None}}


def clean(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that is fit to be shown: see the module. What is nested too deeply becomes ``"..."``."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return _number(value)
    if depth == _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {text(key): clean(inner, depth + 1) for key, inner in value.items()}
    return [clean(inner, depth + 1) for inner in value]


def _fact(name: str, value: Any) -> Any:
    """Return what an event says under a name; None if it says nothing."""
    check = _FACTS.get(name)
    if check is None and name.startswith(("timing_s/", "sync/")):
        check = _measured
    if check is None or value is None:
        return clean(value)
    return check(value, name)


def _measured(value: Any, name: str) -> float | int | None:
    """Return a number; None for one that is not finite, which a measurement may be."""
    return _number(_of(value, (int, float), name))


def _written_text(value: Any, name: str) -> str:
    return text(_of(value, str, name))


def _measurements(value: Any, name: str) -> dict[str, float | int]:
    """Return names to numbers, without those that are not finite."""
    found = {text(key): _measured(one, f"{name}.{key}") for key, one in _of(value, dict, name).items()}
    return {key: one for key, one in found.items() if one is not None}


def _counts(value: Any, name: str) -> dict[str, int]:
    return {text(key): _count(one, f"{name}.{key}") for key, one in _of(value, dict, name).items()}


def _count(value: Any, name: str) -> int:
    if 0 <= _of(value, int, name) < _LARGEST:
        return value
    raise ValueError(f"{name} is no count")


_FACTS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(
        ("n", "version", "buckets", "rss_bytes", "failed", "repeats", "repeated", "events"), _count
    ),
    **dict.fromkeys(("samples", "drafted", "accepted"), _count),
    **dict.fromkeys(("seconds", "load_seconds", "commit_seconds", "acceptance_length"), _measured),
    **dict.fromkeys(("outcome", "role"), _written_text),
    "values": _measurements,
    "arms": _counts,
    "by": _counts,
}
"""Facts of events that are computed with, to what checks them. Others are shown as they are."""


def _patch(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"state": "", "detail": "", "calls": None, "target": "", "tested": None}
    for name, one in _mapping(value, "a patch").items():
        if name in _OF_A_PATCH and one is not None:
            found[name] = (
                text(_of(one, str, name)) if _OF_A_PATCH[name] is str else _of(one, _OF_A_PATCH[name], name)
            )
    if found["state"] not in _STATES:
        raise ValueError(f"a patch is in the state {found['state']!r}")
    _count(found["calls"], "calls")
    return found


def _choice(value: Any) -> dict[str, Any]:
    value = _mapping(value, "on")
    return {"name": _text(value, "name"), "options": clean(_field(value, "options", dict))}


def _identity(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"host": _text(value, "host"), "pid": _pid(value, "pid"), "start": _text(value, "start")}


def _pid(value: Mapping[str, Any], name: str, least: int = 1) -> int:
    found = _field(value, name, int)
    if not least <= found <= _LAST_PID:
        raise ValueError(f"{name} is no process's")
    return found


def _time(value: Any, name: str) -> float:
    if 0 <= _of(value, (int, float), name) < _LAST_TIME:
        return float(value)
    raise ValueError(f"{name} is no time")


def _text(value: Mapping[str, Any], name: str) -> str:
    return text(_field(value, name, str))


def _texts(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(text(_of(one, str, name)) for one in _field(value, name, list))


def _scalar(value: Any) -> Any:
    found = clean(value)
    return str(found) if isinstance(found, (list, dict)) else found


def _field(value: Mapping[str, Any], name: str, kind: Any) -> Any:
    if name not in value:
        raise ValueError(f"no key {name!r}")
    return _of(value[name], kind, name)


def _of(value: Any, kind: Any, name: str) -> Any:
    """Return a value of this type; True and False are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise ValueError(f"{text(str(name))[:60]} is {type(value).__name__}")
    return value


def _mapping(value: Any, name: str) -> dict[str, Any]:
    return _of(value, dict, name)


def _number(value: float) -> float | int | None:
    return value if -_LARGEST < value < _LARGEST and not math.isnan(value) else None


def _visible(letter: str) -> str:
    if letter.isspace() or unicodedata.category(letter) == "Zs":
        return " "
    return f"\\u{ord(letter):04x}"
