"""Check option values from a preset, a config table or keyword arguments against the family's record."""

from __future__ import annotations

from flashpatch import plain_json
from flashpatch.errors import PatchError, closest, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from flashpatch.index import IndexedFamily, Option
    from flashpatch.record import Family

CONFIG = "flashpatch.toml"


def defaults(family: Family | IndexedFamily) -> dict[str, Any]:
    """Every option of the family at its default."""
    return {name: option.default for name, option in family.options.items()}


def changed(family: Family | IndexedFamily, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are not the family's defaults."""
    return {name: value for name, value in values.items() if value != family.options[name].default}


def row(name: str, option: Option) -> tuple[str, str, str, str]:
    """An option as tables show it: name, default, values and meaning, spelt as in the config."""
    return name, written(option.default), allowed(option), option.help


def written(value: Any) -> str:
    """A value as the config file has it."""
    return "unset" if value is None else plain_json.dumps(value)  # JSON's spelling of such values is TOML's


def allowed(option: Option, between: str = ", ") -> str:
    """What may be written for an option: its values, or what is to stand there."""
    if values := (True, False) if option.kind is bool else option.choices:
        return f"{'a list of ' if option.kind is list else ''}{between.join(map(written, values))}"
    if option.kind is list:
        return "a list of tables" if option.items is dict else 'a list, such as ["a", "b"]'
    word = {str: "text in quotes", int: "a whole number", float: "a number"}[option.kind]
    return f"{word} {option.range}".rstrip()


def checked(family: Family | IndexedFamily, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ``values``. Raises PatchError, which names their ``source``, for an unknown option or a value that it does not take."""
    return {name: _checked_one(family, name, value, source) for name, value in values.items()}


def _checked_one(family: Family | IndexedFamily, name: str, value: Any, source: str) -> Any:
    option = family.options.get(name)
    if option is None:
        raise PatchError(
            f"unknown option {name!r} in {source}.", patch=family.name, advice=nearest(name, family.options)
        )
    if _fits(option, value) and (value is None or option.in_range(value)):
        return list(value) if option.kind is list and value is not None else value
    wanted = "one of its values" if option.choices else f"of type {option.kind.__name__}"
    if option.kind is list:
        wanted += f" of {option.items.__name__}"
    elif _fits(option, value):
        wanted = option.range
    near = closest(value, filter(None, option.choices)) if option.kind is type(value) is str else ""
    raise PatchError(
        f"option {name!r} in {source} is {value!r}, not {wanted}.",
        patch=family.name,
        advice=f"{f'Did you mean {near!r}? ' if near else ''}Write {name} = {allowed(option, ' or ')}: {option.help}",
    )


def _fits(option: Option, value: Any) -> bool:
    if value is None:
        return option.default is None
    if option.kind is list:
        held = isinstance(value, (list, tuple)) and all(isinstance(item, option.items) for item in value)
        return held and all(item in option.choices for item in value if option.choices)
    if option.choices:
        return value in option.choices and isinstance(value, bool) == (option.kind is bool)
    if isinstance(value, bool):
        return option.kind is bool
    return isinstance(value, (int, float) if option.kind is float else option.kind)


class Config:
    """Hold the checked content of a config file; without arguments that of none.

    Attributes:
        enable: names to switch on with ``FLASHPATCH=1`` or ``enable()``; None when the file does not say.
        strict: None when the file does not say.
        tables: family name to options."""

    __slots__ = ("enable", "strict", "tables")

    def __init__(
        self,
        enable: tuple[str, ...] | None = None,
        strict: bool | None = None,
        tables: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        self.enable, self.strict, self.tables = enable, strict, tables
