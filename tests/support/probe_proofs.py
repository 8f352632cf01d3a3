"""The proofs that a probe is written to give, read from its source: what a test compares with those that it gave."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any


def patterns(module: ModuleType) -> Iterator[re.Pattern[str]]:
    """Yield what each ``Proof(...)`` of a module says, with what varies left open; those that report a failed run not."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Proof":
            _, what, ok, *_ = node.args
            if not (isinstance(ok, ast.Constant) and ok.value is False):
                yield re.compile(_pattern(what))


def _pattern(what: ast.expr) -> str:
    if isinstance(what, ast.Constant):
        return re.escape(what.value)
    if isinstance(what, ast.JoinedStr):
        return "".join(_pattern(part) if isinstance(part, ast.Constant) else ".+" for part in what.values)
    return ".+"


def missing(module: ModuleType, proofs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the proofs of the source that were not given."""
    said = [proof["what"] for proof in proofs]
    return [one.pattern for one in patterns(module) if not any(one.fullmatch(what) for what in said)]
