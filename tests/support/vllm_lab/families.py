"""Read `families.toml`: the tiny models of engines, and more for what needs no engine of each, which differ from Llama in one thing
or another."""

import tomllib
from pathlib import Path
from typing import Any

Family = tuple[str, dict[str, Any]]
"""transformers' model_type, and what its configuration has beyond the common part."""


def _read(section: str) -> dict[str, Family]:
    found = tomllib.loads(Path(__file__).with_name("families.toml").read_text())[section]
    return {name: (kind, own | dict.fromkeys(own.pop("none", ()))) for name, (kind, own) in found.items()}


FAMILIES, MORE = map(_read, ("families", "more"))
