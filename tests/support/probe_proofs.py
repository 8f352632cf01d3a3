"""The proofs that a probe is written to give, read from its source: what a test compares with those that it gave."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

HELPERS = ("_proof", "_equal")
"""Functions of a probe that make a proof; what it says is their first argument."""


def patterns(module: ModuleType) -> Iterator[re.Pattern[str]]:
    """Yield what each ``Proof(...)`` of a module says, or a helper's call that makes one (`HELPERS`), with what varies
    left open; those that report a failed run not."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if name == "Proof" or name in HELPERS:
            what, ok, *_ = node.args[name == "Proof" :]
            if not (isinstance(ok, ast.Constant) and ok.value is False):
                yield re.compile(_pattern(what))


def _pattern(what: ast.expr) -> str:
    if isinstance(what, ast.Constant):
        return re.escape(what.value)
    if isinstance(what, ast.JoinedStr):
        return "".join(_pattern(part) if isinstance(part, ast.Constant) else ".+" for part in what.values)
    if isinstance(what, ast.IfExp):
        return f"(?:{_pattern(what.body)}|{_pattern(what.orelse)})"
    return ".+"


def missing(module: ModuleType, proofs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the proofs of the source that were not given."""
    said = [proof["what"] for proof in proofs]
    return [one.pattern for one in patterns(module) if not any(one.fullmatch(what) for what in said)]
