"""Write JSON without importing the package `json`, which costs a bare interpreter more than the rest of our start."""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii as _quoted  # what the package itself uses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def dumps(value: Any) -> str:
    """What ``json.dumps(value, default=repr)`` gives."""
    if "json" not in sys.modules:
        try:
            return _text(value)
        except TypeError:
            pass
    import json

    return json.dumps(value, default=repr)


def _text(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int or (kind is float and value - value == 0):  # finite
        return repr(value)
    if kind is dict:
        return "{" + ", ".join([f"{_quoted(key)}: {_text(inner)}" for key, inner in value.items()]) + "}"
    if kind is list or kind is tuple:
        return "[" + ", ".join([_text(inner) for inner in value]) + "]"
    raise TypeError(kind)
