"""Compute the integer arithmetic of shell scripts, ``$((1024 * 2))``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_LONGEST = 200
_LARGEST = 1 << 63
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right) if abs(left) < 1 << 50 else left // right,
    ast.Mod: lambda left, right: left - right * int(left / right),
}


def value(expression: str, variables: Mapping[str, str]) -> int | None:
    """Return the value of an expression of + - * / %; None where it is another, or has an unknown variable.

    Args:
        expression: what stands between ``$((`` and ``))``.
        variables: text of each variable.
    """
    if len(expression) > _LONGEST:
        return None
    try:
        found = _value(ast.parse(expression.replace("$", "").strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError, RecursionError):
        return None
    return found if abs(found) < _LARGEST else None


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, variables)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, variables), _value(node.right, variables))
    raise ValueError(f"not an integer expression: {type(node).__name__}")
