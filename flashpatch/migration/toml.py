"""Write a configuration as TOML, with comments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def comment(text: str, width: int = 108) -> Iterator[str]:
    """Yield the lines of a comment; characters that would end it become question marks."""
    import textwrap

    clean = "".join(char if char.isprintable() else "?" for char in text)
    lines = textwrap.wrap(
        clean, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="    "
    )
    yield from (f"# {line}" for line in lines)


def document(names: Iterable[str], tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a configuration.

    Args:
        names: those to switch on.
        tables: family to option to value: strings, numbers, booleans, and lists of strings or of tables.
    """
    yield f"enable = {value(list(names))}"
    for family, options in tables.items():
        plain = {name: given for name, given in options.items() if not _is_tables(given)}
        nested = {name: given for name, given in options.items() if _is_tables(given)}
        if plain:
            yield from ("", f"[{family}]")
        for name, given in plain.items():
            yield f"{name} = {value(given)}"
        for name, given in nested.items():
            for entry in given:
                yield from (
                    "",
                    f"[[{family}.{name}]]",
                    *(f"{key} = {value(held)}" for key, held in entry.items()),
                )


def value(given: Any) -> str:
    """Return a value as TOML. Raises TypeError for what TOML has no form for here."""
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, (int, float)):
        return repr(given)
    if isinstance(given, str):
        return json.dumps(given, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(given, (list, tuple)):
        return f"[{', '.join(value(item) for item in given)}]"
    raise TypeError(f"no TOML for {type(given).__name__}")


def _is_tables(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(item, Mapping) for item in given)
