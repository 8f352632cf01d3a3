"""Resolve names, options and strictness from ``enable()``, the environment and the config.

Precedence: ``enable()`` in this process, then the resolved data a parent process exported, then
``FLASHPATCH`` with the config, then defaults. Of the options: ``enable(**options)``, then what the chosen
name presets, then the config, then defaults.

Most processes of a job do no more than this, so built-in families are looked up in the index, which imports none of them."""

from __future__ import annotations

import os

from flashpatch import index, plain_json
from flashpatch.errors import PatchError, nearest
from flashpatch.settings import child_env, options
from flashpatch.settings.options import CONFIG, Config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from flashpatch.index import IndexedFamily
    from flashpatch.record import Family

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


class Choice:
    """Hold one family that is on: the name the user chose, every option, whether ``enable()`` in this process chose it."""

    __slots__ = ("explicit", "name", "options")

    def __init__(self, name: str, options: Mapping[str, Any], explicit: bool = False) -> None:
        self.name, self.options, self.explicit = name, options, explicit


class Selection:
    """Hold all families that are on: family name to `Choice`."""

    __slots__ = ("choices", "strict")

    def __init__(self, choices: Mapping[str, Choice], strict: bool = False) -> None:
        self.choices, self.strict = choices, strict

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(choice.name for choice in self.choices.values())


NOTHING = Selection({})


def from_environment(current: Selection) -> Selection:
    """Resolve the selection of the environment; what ``enable()`` chose in this process wins. Raises PatchError if a name or option is unknown,
    a value is of the wrong type, or the config cannot be read."""
    asked = os.environ.get("FLASHPATCH", "")
    if asked in ("", "0"):
        return current
    base = inherited(asked, os.environ.get("FLASHPATCH_RESOLVED", ""))
    if base is None:
        settings = config()
        base = _of_names(asked, settings, strictness(settings))
    explicit = {family: choice for family, choice in current.choices.items() if choice.explicit}
    return Selection({**base.choices, **explicit}, current.strict if explicit else base.strict)


def extend(
    current: Selection, names: Iterable[str], strict: bool | None, values: Mapping[str, Any]
) -> Selection:
    """Return ``current`` with ``names`` switched on, as by ``enable(*names, strict=strict, **values)``.

    Without names, those of the config, else fp8. A family that is on keeps its options unless ``values`` say otherwise.

    Raises:
        PatchError: an unknown name or option, or two names of one family."""
    settings = config()
    chosen = _one_per_family(tuple(names) or _default_names(settings))
    known = {option for family in chosen for option in _record(family).options}
    if unknown := [option for option in values if option not in known]:
        raise PatchError(
            f"unknown option {unknown[0]!r} in enable().",
            patch=", ".join(chosen.values()),
            advice=nearest(unknown[0], known),
        )
    choices = dict(current.choices)
    for family, name in chosen.items():
        before = choices.get(family)
        if before is not None and before.name != name and before.explicit:
            raise _two_names(family, before.name, name, f"Call disable({before.name!r}) first.")
        same = before is not None and before.name == name
        base = before.options if before is not None and same else _base_options(family, name, settings)
        own = {key: value for key, value in values.items() if key in _record(family).options}
        _left_to_the_name(family, name, own, "enable()")
        choices[family] = Choice(name, {**base, **_checked(family, own, "enable()")}, explicit=True)
    if strict is None:
        strict = current.strict if current.choices else strictness(settings)
    return Selection(choices, strict)


def reduce(current: Selection, names: Iterable[str]) -> Selection:
    """Return ``current`` without the families of ``names``; without any family when no name is given. Raises PatchError for an
    unknown name."""
    gone = {_family_of(name) for name in names} or set(current.choices)
    return Selection({f: choice for f, choice in current.choices.items() if f not in gone}, current.strict)


def export(selection: Selection) -> None:
    """Hand the selection to processes started from now on, or withdraw it when nothing is on.

    The value of ``FLASHPATCH`` stays as the user wrote it while it means the same; a child started with another value ignores
    the resolved data."""
    if not selection.choices:
        child_env.withdraw()
        return
    asked = os.environ.get("FLASHPATCH", "")
    if asked != "1" or any(choice.explicit for choice in selection.choices.values()):
        asked = ",".join(selection.names)
    child_env.export(asked, resolved(asked, selection))


def resolved(asked: str, selection: Selection) -> str:
    """Return the value of ``FLASHPATCH_RESOLVED`` that goes with the value ``asked`` of ``FLASHPATCH``."""
    values = {family: dict(choice.options) for family, choice in selection.choices.items()}
    names, strict = list(selection.names), selection.strict
    return plain_json.dumps({"from": asked, "names": names, "options": values, "strict": strict})


def inherited(asked: str, text: str) -> Selection | None:
    """What ``text``, of ``FLASHPATCH_RESOLVED``, says, if it was resolved from this value of ``FLASHPATCH``. Raises
    PatchError if the text is not ours, or its names or options are wrong."""
    if not text:
        return None
    if f'"from": "{asked}"' in text:  # defaults, most often: no need to parse
        for strict in (False, True):
            found = _of_names(asked, Config(), strict)
            if text == resolved(asked, found):
                return found
    import json

    try:
        data = json.loads(text)
        if data["from"] != asked:
            return None
        chosen, strict = _one_per_family(data["names"]), bool(data["strict"])
        given = {family: dict(table) for family, table in data["options"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchError(
            f"FLASHPATCH_RESOLVED is not what FlashPatch writes ({type(error).__name__}: {error}).",
            advice="Unset it; FLASHPATCH is enough.",
        ) from error
    choices = {}
    for family, name in chosen.items():
        own = _checked(family, given.get(family, {}), "FLASHPATCH_RESOLVED")
        choices[family] = Choice(name, {**options.defaults(_record(family)), **own})
    return Selection(choices, strict)


def _of_names(asked: str, settings: Config, strict: bool) -> Selection:
    names = _default_names(settings) if asked == "1" else names_in(asked)
    chosen = _one_per_family(names)
    return Selection(
        {f: Choice(name, _base_options(f, name, settings)) for f, name in chosen.items()}, strict
    )


def _default_names(settings: Config) -> tuple[str, ...]:
    """Return what ``FLASHPATCH=1`` and ``enable()`` stand for."""
    return ("fp8",) if settings.enable is None else settings.enable


def names_in(asked: str) -> tuple[str, ...]:
    """Return the names in a value of ``FLASHPATCH``."""
    return tuple(name.strip() for name in asked.split(",") if name.strip())


def config() -> Config:
    """Return what the file says that ``FLASHPATCH_CONFIG`` names, else ``./flashpatch.toml`` if there is one. Raises
    PatchError if a named file is missing, is not TOML, or has an unknown key or wrong value."""
    if not os.environ.get("FLASHPATCH_CONFIG") and not os.path.isfile(CONFIG):
        return Config()
    from flashpatch.settings import config_file

    return config_file.load()


def _record(family: str) -> Family | IndexedFamily:
    """Return what the index says about a family, or the family itself if the index does not know it."""
    if family in index.families():
        return index.family(family)
    from flashpatch import registry

    return registry.family(family)


def _family_of(name: str) -> str:
    """Return the name of the family that a user's name stands for. Raises PatchError for an unknown name."""
    if not isinstance(name, str):
        raise PatchError(f"a name is text, not {name!r}.", advice='Write enable("fp8", "flowrl").')
    found = index.family_of(name)
    if found is not None:
        return found
    from flashpatch import registry

    return registry.family_of(name).name


def _checked(family: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    try:
        return options.checked(_record(family), values, source)
    except PatchError:
        from flashpatch import registry
    return options.checked(registry.family(family), values, source)  # its record knows the advice


def _base_options(family: str, name: str, settings: Config) -> dict[str, Any]:
    record, table = _record(family), settings.tables.get(family, {})
    _left_to_the_name(family, name, table, f"[{family}] of {os.environ.get('FLASHPATCH_CONFIG') or CONFIG}")
    preset = _checked(family, record.names.get(name, {}), f"the preset of {name!r}")
    return {**options.defaults(record), **table, **preset}


def _left_to_the_name(family: str, name: str, given: Mapping[str, Any], source: str) -> None:
    """Raise PatchError if a value given in ``source`` is not what the name sets, for an option that each name of the family sets."""
    names = {family: {}, **_record(family).names}
    for option, value in names.get(name, {}).items():
        if given.get(option, value) != value and all(option in preset for preset in names.values()):
            raise PatchError(
                f"option {option!r} in {source} is {given[option]!r}, but the name {name!r} decides it: {value!r}.",
                patch=name,
                advice=f"Leave {option} out, or choose another name: {', '.join(names)}.",
            )


def _one_per_family(names: Iterable[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for name in names:
        family = _family_of(name)
        if chosen.setdefault(family, name) != name:
            raise _two_names(family, chosen[family], name, "Choose one of them.")
    return chosen


def _two_names(family: str, first: str, second: str, advice: str) -> PatchError:
    return PatchError(f"{first!r} and {second!r} are two names of one family.", patch=family, advice=advice)


def strictness(settings: Config) -> bool:
    """Return whether strict mode is on. Raises PatchError if ``FLASHPATCH_STRICT`` says neither."""
    text = os.environ.get("FLASHPATCH_STRICT")
    if text is None:
        return bool(settings.strict)
    word = text.strip().lower()
    if word not in _YES | _NO:
        raise PatchError(f"FLASHPATCH_STRICT is {text!r}.", advice="Set it to 1 or 0.")
    return word in _YES
