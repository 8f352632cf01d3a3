"""Check what processes wrote, once, where it is read: types, sizes, and letters that a terminal would obey.

`loads` escapes a whole value: what it returns holds no control characters, no lone surrogates, no number that is not finite,
and is nested at most `_DEEPEST` times, so that whatever shows it need not look again. A row or an expected row that does not
fit is refused with a reason. An event whose known facts do not fit is none."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, get_args

from flashpatch.record import StateWord

BROKEN = (OSError, ValueError)
"""What reading a damaged file may raise; the functions here raise ValueError alone."""

Check = Callable[[Any, str], Any]
"""Return a value, given its name, as it is to be used; raise ValueError if it is not what it must be."""

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
    """Return the fields of a `flashpatch.ledger.runs.Row`, of a value that `loads` returned. Raises ValueError if one is missing or wrong."""
    found = _fields(value, _ROW, "the row")
    return found | {name: check(value[name], name) for name, check in _LATER.items() if name in value}


def expected(value: Any) -> dict[str, Any]:
    """Return the fields of a `flashpatch.ledger.runs.Expected`. Raises ValueError as `row` does."""
    return _fields(value, _EXPECTED, "the expected row")


def event(line: bytes | str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is none, as the last one of a killed process may be."""
    try:
        value = loads(line)
        found = {"t": _time(value["t"], "t"), "event": _word(value["event"], "event")}
        for name, fact in value.items():
            if name not in found and fact is not None:
                check = _FACTS.get(name) or (_measured if name.startswith(("timing_s/", "sync/")) else None)
                found[sys.intern(name)] = check(fact, name) if check else fact
        return found
    except (ValueError, KeyError, TypeError):  # it has not the two, or is no mapping
        return None


def _clean(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that is fit to be shown; what is nested too deeply is ``"..."``."""
    kind = type(value)
    if kind is str:
        return value if value.isprintable() else text(value)
    if kind in (int, float):
        return value if -_LARGEST < value < _LARGEST else None  # what is no number is not between
    if kind not in (dict, list):
        return value
    if depth == _DEEPEST:
        return "..."
    if kind is dict:
        items = value.items()
        return {key if key.isprintable() else text(key): _clean(inner, depth + 1) for key, inner in items}
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


def _is(*kinds: type) -> Check:
    """Return a check for values of some types."""
    return lambda value, name: _of(value, kinds, name)


def _each(check: Check, or_none: bool = False) -> Check:
    """Return a check for mappings whose values all pass ``check``; with ``or_none`` those that are None are left out."""
    return lambda value, name: {
        key: check(one, f"{name}.{key}")
        for key, one in _mapping(value, name).items()
        if one is not None or not or_none
    }


def _fields(value: Any, checks: Mapping[str, Check], name: str) -> dict[str, Any]:
    """Return the values of a mapping under these names, checked."""
    held = _mapping(value, name)
    if absent := [repr(key) for key in checks if key not in held]:
        raise ValueError(f"no key {', '.join(absent)}: it is of another version of FlashPatch")
    return {key: check(value[key], key) for key, check in checks.items()}


_text, _mapping, _measured = _is(str), _is(dict), _is(int, float)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_text(one, name) for one in _of(value, list, name))


def _word(value: Any, name: str) -> str:
    return sys.intern(_text(value, name))


def _count(value: Any, name: str) -> int:
    return _between(_of(value, int, name), 0, _LARGEST, f"{name} is no count")


def _time(value: Any, name: str) -> float:
    return float(_between(_measured(value, name), 0, _LAST_TIME, f"{name} is no time"))


def _pid(value: Any, name: str) -> int:
    return _between(_of(value, int, name), int(name != "ppid"), _LAST_PID + 1, f"{name} is no process's")


def _between(value: Any, least: float, end: float, problem: str) -> Any:
    if least <= value < end:
        return value
    raise ValueError(problem)


def _notes(value: Any, name: str) -> dict[str, Any]:
    counts = dict.fromkeys(("policy_version", "drafter_version", "updates", "steps"), _count)
    texts = {"late": _each(_text, or_none=True), "stopped": _each(_text), "refusing": _text}
    checks = {**counts, "policy_since": _time, **texts}
    for key in checks.keys() & _mapping(value, name):
        checks[key](value[key], f"{name}.{key}")
    return value


def _patch(value: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"state": "", "detail": "", "calls": None, "target": "", "tested": None}
    for key, one in _mapping(value, "a patch").items():
        if key in _OF_A_PATCH and one is not None:
            found[key] = _of(one, _OF_A_PATCH[key], key)
    if found["state"] not in _STATES:
        raise ValueError(f"a patch is in the state {found['state']!r}")
    _count(found["calls"], "calls")
    return found


def _choice(value: Any, name: str) -> dict[str, Any]:
    found = _fields(value, {"name": _text, "options": _mapping}, name)
    return found | {"off": True} if value.get("off") else found


_OF_A_PATCH = {"state": str, "detail": str, "calls": int, "target": str, "tested": bool}
_PROCESS = {"host": _text, "pid": _pid, "start": _text}
_EXPECTED = {**_PROCESS, "roles": _texts, "families": _texts, "by": _pid}
_ROW: Mapping[str, Check] = {
    **_PROCESS,
    **dict.fromkeys(("argv0", "written"), _text),
    "ppid": _pid,
    "roles": _texts,
    "rank": _each(lambda value, name: str(value) if isinstance(value, (list, dict)) else value),
    "versions": _each(_text),
    "patches": _each(_patch),
    "notes": _notes,
    "error": _is(str, type(None)),
}
idle: Check = _ROW["patches"]  # patches that rows name together
_LATER = {
    **dict.fromkeys(("run", "title", "engine", "idle"), _text),
    "ended": _is(str, type(None)),
    "first": lambda value, name: value if value is None else _of(value, bool, name),
    "first_written": _time,
    "on": _each(_choice),
}
"""What rows of earlier versions have not."""

_FACTS: Mapping[str, Check] = {
    **dict.fromkeys(
        ("n", "version", "buckets", "rss_bytes", "failed", "repeats", "repeated", "events", "lost"), _count
    ),
    **dict.fromkeys(("samples", "drafted", "accepted"), _count),
    **dict.fromkeys(("seconds", "load_seconds", "commit_seconds", "acceptance_length"), _measured),
    **dict.fromkeys(("outcome", "role"), _word),
    "values": _each(_measured, or_none=True),
    **dict.fromkeys(("arms", "by"), _each(_count)),
}
"""Facts of events that are computed with, to what checks them. Others are shown as they are."""
