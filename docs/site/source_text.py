"""What expressions of a source file print, found by syntax: texts as they are, all else as ``‹expression›``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SHOWN = 60
DEPTH = 3
ALTERNATIVES = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Scope:
    """The names that can be seen from a place in a file.

    Attributes:
        file: relative to the tree.
        values: expressions that are assigned to each name.
        imported: the module, without the package's own prefix, that each imported name is from.
    """

    file: str
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)

    def within(self, function: Function) -> Scope:
        """Return the scope of a function's body."""
        values = {name: said for name, said in self.values.items() if name not in parameters(function)}
        return Scope(self.file, {**values, **assigned(ast.walk(function))}, self.imported)


Place = tuple[ast.AST, Scope, Function | None]
"""A node, its scope, and the innermost function around it."""


def of_module(file: str, module: ast.Module) -> Scope:
    """Return the scope of a module's top level."""
    imported = {
        name.asname or name.name: node.module.removeprefix("flashpatch.")
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }
    return Scope(file, assigned(module.body), imported)


def share_constants(scopes: Iterable[Scope]) -> None:
    """Let each scope see the constants of the other files that it imports by name."""
    by_module = {scope.file.removesuffix(".py").replace("/", "."): dict(scope.values) for scope in scopes}
    for scope in list(scopes):
        for name, source in scope.imported.items():
            known = by_module.get(source) or by_module.get(f"flashpatch.{source}") or {}
            if name in known:
                scope.values.setdefault(name, known[name])


def nodes(module: ast.Module, scope: Scope) -> Iterator[Place]:
    """Yield each node of a module, its scope, and the innermost function around it."""
    todo: list[Place] = [(module, scope, None)]
    while todo:
        node, inner, function = todo.pop()
        yield node, inner, function
        if isinstance(node, Function):
            inner, function = inner.within(node), node
        todo += [(child, inner, function) for child in ast.iter_child_nodes(node)]


def parameters(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, ``self`` left out."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return tuple(name for name in names if name not in ("self", "cls"))


def assigned(among: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return the expressions that are assigned to each name by these statements."""
    found: dict[str, list[ast.expr]] = {}
    for node in among:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = _pairs(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = _pairs(node.target, node.value)
        else:
            continue
        for name, value in pairs:
            found.setdefault(name, []).append(value)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, said in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, said)


def text(node: ast.expr | None, scope: Scope, given: Mapping[str, str] | None = None, depth: int = 0) -> str:
    """Return what an expression prints; ``given`` has the text of parameters. None gives an empty text."""

    def of(part: ast.expr) -> str:
        return text(part, scope, given, depth)

    match node:
        case None | ast.Constant(value=None):
            return ""
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(map(of, parts))
        case ast.FormattedValue(value=value):
            return of(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return of(left) + of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _either([of(body), of(orelse)])
        case ast.BoolOp(values=values):
            return _either(map(of, values))
        case ast.Name(id=name) if given and name in given:
            return given[name]
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(at))) if _item(
            scope, name, at
        ):
            return of(_item(scope, name, at))
        case ast.Name(id=name) if depth < DEPTH:
            values = scope.values.get(name, [])
            if values and len(values) <= ALTERNATIVES and all(map(_says, values)):
                return _either(text(value, scope, given, depth + 1) for value in values)
    shown = ast.unparse(node)
    return f"‹{shown if len(shown) <= SHOWN else shown[:SHOWN] + '…'}›"


def _item(scope: Scope, name: str, at: int) -> ast.expr | None:
    """Return an item of a tuple that a name is assigned once."""
    match scope.values.get(name):
        case [ast.Tuple(elts=items)] if -len(items) <= at < len(items):
            return items[at]
    return None


def _says(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant | ast.JoinedStr | ast.IfExp | ast.BinOp | ast.Name)


def _either(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(filter(None, texts)))
