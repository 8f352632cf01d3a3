"""What the values of our variables mean, for code that may import next to nothing."""

from __future__ import annotations

OFF = ("", "0")
"""Values of ``FLASHPATCH`` that switch nothing on."""

DEFAULT_NAMES = ("fp8",)
"""What ``FLASHPATCH=1`` and ``enable()`` stand for if no config says otherwise."""

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


def flag(text: str) -> bool | None:
    """A variable's value as yes or no; None when it is neither."""
    word = text.strip().lower()
    return True if word in _YES else False if word in _NO else None


def names(asked: str) -> tuple[str, ...]:
    """The names in a value of ``FLASHPATCH``."""
    return tuple(name.strip() for name in asked.split(",") if name.strip())
