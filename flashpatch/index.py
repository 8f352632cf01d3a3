"""Tell names, options and target modules of the built-in families without importing one of them.

The data is `flashpatch._index`, a generated file: ``python -m flashpatch.write_index`` writes it anew. Run that when a
family's names, options or targets have changed; a test fails until then."""

from __future__ import annotations

from flashpatch import _index

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from flashpatch.record import Family

_DATA: Mapping[str, Any] = _index.FAMILIES
_FAMILIES: dict[str, IndexedFamily] = {}
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (str, bool, int, float, list, dict)}


class Option:
    """Describe one option of a family.

    Attributes:
        default: value if it is not set.
        help: one sentence; the index has none.
        choices: allowed values, or empty for any value of the default's type.
        kind: type the value must have (``str``, ``bool``, ``int``, ``float``, ``list``).
        items: what a list holds: ``str``, or ``dict`` for tables, ``[[family.option]]`` in TOML, whose
            content the family checks itself.
        least, most: smallest and largest allowed number, themselves included; None for no bound. A number
            that is not finite is outside of any range.
        above, below: the same bounds with the bound itself excluded.

    Raises:
        ValueError: bounds for a kind that is no number, two bounds on one side, or a default out of range."""

    def __init__(
        self,
        default: Any,
        help: str,
        choices: tuple[Any, ...] = (),
        kind: type = str,
        items: type = str,
        least: float | None = None,
        most: float | None = None,
        above: float | None = None,
        below: float | None = None,
    ) -> None:
        self.default, self.help, self.choices, self.kind, self.items = default, help, choices, kind, items
        self.least, self.most, self.above, self.below = least, most, above, below
        if least is most is above is below is None:
            return
        if kind not in (int, float):
            raise ValueError(f"a range for an option of type {kind.__name__}")
        if None not in (least, above) or None not in (most, below):
            raise ValueError("two bounds on one side of an option")
        if default is not None and not self.in_range(default):
            raise ValueError(f"the default {default} of an option is not {self.range}")

    @property
    def range(self) -> str:
        """The bounds in words, such as ``"at least 0 and below 1"``; empty without any."""
        bounds = (
            ("at least", self.least),
            ("above", self.above),
            ("at most", self.most),
            ("below", self.below),
        )
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    def in_range(self, value: float) -> bool:
        """Whether a number is within the bounds, if there are any; one that is not finite never is."""
        if not self.range:
            return True
        return (
            value - value == 0  # neither infinite nor NaN
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


class IndexedFamily:
    """A family as the index has it.

    Attributes:
        name: the family's name.
        names: names a user may type, each with the options it presets.
        options: option name to `Option`.
        modules: those whose import is the moment to load the family."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name = name
        self.names: Mapping[str, Mapping[str, Any]] = data["names"]
        self.options = {
            option: Option(default, "", choices, _KINDS[kind], _KINDS[items], *bounds)
            for option, (default, choices, kind, items, bounds) in data.get("options", {}).items()
        }
        self.modules: set[str] = {*data["modules"].split()}


def family_of(name: str) -> str | None:
    """The built-in family that a user's name stands for, or None."""
    return next((family for family, data in _DATA.items() if name in data["names"]), None)


def family(name: str) -> IndexedFamily:
    """A built-in family. Raises KeyError for any other name."""
    if name not in _FAMILIES:
        _FAMILIES[name] = IndexedFamily(name, _DATA[name])
    return _FAMILIES[name]


def families() -> tuple[str, ...]:
    """Names of the built-in families."""
    return tuple(_DATA)


def patch_ids() -> tuple[str, ...]:
    """Ids of the built-in families' patches."""
    return tuple(id for data in _DATA.values() for id in data["patches"].split())


def owners(part: str) -> dict[str, str]:
    """Each key of the built-in families' ``names`` or ``commands``, to the family that has it."""
    return {key: family for family, data in _DATA.items() for key in data.get(part, {})}


def merged(part: str) -> dict[str, Any]:
    """The built-in families' ``names`` or ``commands`` in one dictionary."""
    return {key: value for data in _DATA.values() for key, value in data.get(part, {}).items()}


def entry(record: Family) -> dict[str, Any]:
    """What the index should say about a family; ``modules`` are those of targets."""
    targets = (target for patch in record.patches for target in patch.targets)
    parts = {
        "names": {name: dict(preset) for name, preset in {record.name: {}, **record.names}.items()},
        "options": {
            name: (
                option.default,
                tuple(option.choices),
                option.kind.__name__,
                option.items.__name__,
                (option.least, option.most, option.above, option.below) if option.range else (),
            )
            for name, option in record.options.items()
        },
        "modules": " ".join(dict.fromkeys(target.partition(":")[0] for target in targets)),
        "patches": " ".join(patch.id for patch in record.patches),
        "commands": dict(record.commands),
    }
    return {part: table for part, table in parts.items() if table}


def is_stale(record: Family) -> bool:
    """Whether the index says something else about a built-in family than its record does."""
    return _DATA[record.name] != entry(record)
