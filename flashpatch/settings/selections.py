"""Resolve names, options and strictness from ``enable()``, the environment and the config.

Precedence: ``enable()`` in this process, then the resolved data a parent process exported, then
``FLASHPATCH`` with the config, then defaults. Of the options: ``enable(**options)``, then what the chosen
name presets, then the config, then defaults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashpatch import registry, variables
from flashpatch.errors import PatchError
from flashpatch.settings import child_env, config_file, options
from flashpatch.suggest import nearest


@dataclass(frozen=True)
class Choice:
    """Hold one family that is on, with its options.

    Attributes:
        name: the name the user chose, one of the family's.
        options: every option with its value.
        explicit: whether ``enable()`` in this process chose it.
    """

    name: str
    options: Mapping[str, Any]
    explicit: bool = False


@dataclass(frozen=True)
class Selection:
    """Hold all families that are on: family name to `Choice`."""

    choices: Mapping[str, Choice]
    strict: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(choice.name for choice in self.choices.values())


NOTHING = Selection({})


def from_environment(current: Selection) -> Selection:
    """Resolve the selection of the environment; what ``enable()`` chose in this process wins.

    Raises:
        PatchError: an unknown name or option, a value of the wrong type, an unreadable config.
    """
    asked = os.environ.get("FLASHPATCH", "")
    if asked in ("", "0"):
        return current
    base = inherited(asked, os.environ.get("FLASHPATCH_RESOLVED", "")) or _resolve(asked)
    explicit = {family: choice for family, choice in current.choices.items() if choice.explicit}
    return Selection({**base.choices, **explicit}, current.strict if explicit else base.strict)


def extend(
    current: Selection, names: Iterable[str], strict: bool | None, values: Mapping[str, Any]
) -> Selection:
    """Return ``current`` with ``names`` switched on, as by ``enable(*names, strict=strict, **values)``.

    Without names, those of the config, else fp8. A family that is on keeps its options unless ``values`` say
    otherwise.

    Raises:
        PatchError: an unknown name or option, or two names of one family.
    """
    settings = config_file.load()
    chosen = _one_per_family(tuple(names) or settings.enable or variables.DEFAULT_NAMES)
    _known_somewhere(values, chosen)
    choices = dict(current.choices)
    for family, name in chosen.items():
        record = registry.family(family)
        before = choices.get(family)
        if before is not None and before.name != name and before.explicit:
            raise _two_names(family, before.name, name, f"Call disable({before.name!r}) first.")
        same = before is not None and before.name == name
        base = before.options if before is not None and same else _base_options(family, name, settings)
        own = {key: value for key, value in values.items() if key in record.options}
        choices[family] = Choice(name, {**base, **options.checked(record, own, "enable()")}, explicit=True)
    if strict is None:
        strict = current.strict if current.choices else _strict(settings)
    return Selection(choices, strict)


def reduce(current: Selection, names: Iterable[str]) -> Selection:
    """Return ``current`` without the families of ``names``; without any family when no name is given.

    Raises:
        PatchError: an unknown name.
    """
    gone = {registry.family_of(name).name for name in names} or set(current.choices)
    return replace(current, choices={f: choice for f, choice in current.choices.items() if f not in gone})


def export(selection: Selection) -> None:
    """Hand the selection to processes started from now on, or withdraw it when nothing is on."""
    if not selection.choices:
        child_env.withdraw()
        return
    values = {family: choice.options for family, choice in selection.choices.items()}
    explicit = any(choice.explicit for choice in selection.choices.values())
    child_env.publish(selection.names, values, selection.strict, explicit)


def inherited(asked: str, text: str) -> Selection | None:
    """What was resolved before, if it was resolved from this value of ``FLASHPATCH``.

    Args:
        asked: the value.
        text: the value of ``FLASHPATCH_RESOLVED``.

    Raises:
        PatchError: the text is not ours, or its names or options are wrong.
    """
    if not text:
        return None
    try:
        data = json.loads(text)
        if data["from"] != asked:
            return None
        chosen, strict = _one_per_family(data["names"]), bool(data["strict"])
        values = {family: dict(table) for family, table in data["options"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchError(
            f"FLASHPATCH_RESOLVED is not what FlashPatch writes ({type(error).__name__}: {error}).",
            advice="Unset it; FLASHPATCH is enough.",
        ) from error
    choices = {}
    for family, name in chosen.items():
        record = registry.family(family)
        given = options.checked(record, values.get(family, {}), "FLASHPATCH_RESOLVED")
        choices[family] = Choice(name, {**options.defaults(record), **given})
    return Selection(choices, strict)


def _resolve(asked: str) -> Selection:
    settings = config_file.load()
    if asked == "1":
        names: tuple[str, ...] = settings.enable or variables.DEFAULT_NAMES
    else:
        names = variables.names(asked)
    chosen = _one_per_family(names)
    choices = {f: Choice(name, _base_options(f, name, settings)) for f, name in chosen.items()}
    return Selection(choices, _strict(settings))


def _base_options(family: str, name: str, settings: config_file.Config) -> dict[str, Any]:
    record = registry.family(family)
    preset = options.checked(record, registry.family_names(record)[name], f"the preset of {name!r}")
    return {**options.defaults(record), **settings.tables.get(family, {}), **preset}


def _one_per_family(names: Iterable[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for name in names:
        family = registry.family_of(name).name
        if chosen.setdefault(family, name) != name:
            raise _two_names(family, chosen[family], name, "Choose one of them.")
    return chosen


def _two_names(family: str, first: str, second: str, advice: str) -> PatchError:
    return PatchError(f"{first!r} and {second!r} are two names of one family.", patch=family, advice=advice)


def _known_somewhere(values: Mapping[str, Any], chosen: Mapping[str, str]) -> None:
    """Each option given to ``enable()`` must belong to at least one of the families it names."""
    known = {option for family in chosen for option in registry.family(family).options}
    for option in values:
        if option not in known:
            raise PatchError(
                f"unknown option {option!r} in enable().",
                patch=", ".join(chosen.values()),
                advice=nearest(option, known),
            )


def _strict(settings: config_file.Config) -> bool:
    text = os.environ.get("FLASHPATCH_STRICT")
    if text is None:
        return bool(settings.strict)
    answer = variables.flag(text)
    if answer is None:
        raise PatchError(f"FLASHPATCH_STRICT is {text!r}.", advice="Set it to 1 or 0.")
    return answer
