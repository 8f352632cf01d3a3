"""Every refusal of the package as it is printed, with its remedy, read from the sources of `PatchError`.

A message is made by a call of ``PatchError``, or of a maker: a function that puts its own parameters into one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from source_text import Function, Place, Scope, nodes, of_module, parameters, share_constants, text

ROOTS = ("flashpatch", "patches", "verify")
ERRORS = ("PatchError", "NoRun")
"""The exception, and the classes that are derived from it."""
REASONS = ("str | None", "Iterator[str]")
"""What functions return, or yield, that give reasons: a refusal, or a state such as ``skipped``, is made of them."""
NO_REASONS = ("remarks",)
SILENT = frozenset(
    "str repr type sorted map join list tuple len set dict max min sum filter get self for in if or and not else is None True False "
    "f r items keys values partition removeprefix removesuffix strip split splitlines __name__ __qualname__".split()
)
"""Names in expressions that say nothing to a reader of a message."""
LISTED = "The error or state that has this reason in it says what to do."
SUPERSEDED = "Nothing: the patch stands aside (superseded)."
RELAYED = "The message is another process's, with its own remedy."


@dataclass(frozen=True)
class Message:
    """One refusal: where it is made, what is printed (``‹expression›`` for what varies), and the remedy."""

    file: str
    line: int
    problem: str
    remedy: str

    @property
    def family(self) -> str:
        """The family it belongs to, or ``flashpatch``, ``verify``."""
        parts = Path(self.file).parts
        return parts[1] if parts[0] == "patches" else parts[0]


@dataclass(frozen=True)
class Maker:
    """A function that makes a `PatchError` of its parameters, itself or through another maker.

    Attributes:
        texts: the parameters that carry the problem; none if only the remedy is a parameter.
        problem, remedy: expressions in ``scope``; with ``through``, the call of that maker and None.
    """

    name: str
    parameters: tuple[str, ...]
    texts: tuple[str, ...]
    defaults: Mapping[str, ast.expr]
    problem: ast.expr
    remedy: ast.expr | None
    scope: Scope
    through: Maker | None = None


def messages(tree: Path) -> list[Message]:
    """Return every message of the package, by file and line."""
    places = _places(tree)
    makers = _makers(places)
    found = {one for file, there in places.items() for one in _of_places(file, there, makers)}
    return sorted(found, key=lambda one: (one.file, one.line, one.problem))


def makers(tree: Path) -> list[Maker]:
    """Return the functions that make a `PatchError` of their parameters."""
    return _makers(_places(tree))


@cache
def _places(tree: Path) -> dict[str, list[Place]]:
    modules = {
        str(path.relative_to(tree)): ast.parse(path.read_text(encoding="utf-8"))
        for root in ROOTS
        for path in sorted((tree / root).rglob("*.py"))
    }
    scopes = {file: of_module(file, module) for file, module in modules.items()}
    share_constants(scopes.values())
    return {file: list(nodes(module, scopes[file])) for file, module in modules.items()}


def table(found: Iterable[Message]) -> str:
    """Return messages as Markdown, a heading and a table per family."""
    by_family: dict[str, list[Message]] = {}
    for message in found:
        by_family.setdefault(message.family, []).append(message)
    return "\n\n".join(_of_family(family, ours) for family, ours in by_family.items())


def _of_family(family: str, ours: Iterable[Message]) -> str:
    rows, reasons = [], []
    for one in ours:
        if one.remedy == LISTED:
            reasons.append(f"- {_cell(one.problem)} (`{one.file}`)")
        else:
            rows.append(f"| {_cell(one.problem)} | {_cell(one.remedy)} | `{one.file}` |")
    head = ["| printed | remedy | made in |", "| --- | --- | --- |"] if rows else []
    below = (
        ["", "Reasons, which an error or a state names beside its remedy:", "", *reasons] if reasons else []
    )
    return "\n".join([f"## {family}", "", *head, *rows, *below])


def _cell(said: str) -> str:
    said = re.sub(r"‹(.*?)›", lambda match: f"‹{word(match[1])}›", said)
    for sign, escaped in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("[", "\\["), ("`", "")):
        said = said.replace(sign, escaped)
    return " ".join(said.split())


def word(expression: str) -> str:
    """Return what to call a value that varies: the last name in its expression that says something."""
    bare = (
        re.sub(r"(?<![\w.])[rf]?'[^']*'|\"[^\"]*\"", " ", expression)
        if re.search(r"[(\[]", expression)
        else expression
    )
    found = [one for one in re.findall(r"[A-Za-z_]\w*", bare) if one not in SILENT]
    found = (
        found or [one for one in re.findall(r"[A-Za-z_]\w*", expression) if one not in SILENT] or ["value"]
    )
    return found[-1].strip("_").replace("_", " ").lower()


def _makers(places: Mapping[str, list[Place]]) -> list[Maker]:
    """Return all makers; those that call other makers are found in further rounds."""
    found: dict[tuple[str, str], Maker] = {}
    while True:
        before = len(found)
        for file, there in places.items():
            for node, scope, function in there:
                if isinstance(node, ast.Call) and function and (file, function.name) not in found:
                    made = _maker(node, scope, function, list(found.values()))
                    if made is not None:
                        found[file, function.name] = made
        if len(found) == before:
            return list(found.values())


def _maker(call: ast.Call, scope: Scope, function: Function, known: list[Maker]) -> Maker | None:
    """Return the function around a call as a maker, if problem or remedy of the call is one of its parameters."""
    own = parameters(function)
    defaults = dict(zip(reversed(own), reversed(function.args.defaults), strict=False))
    if called(call) in ERRORS and call.args:
        problem, remedy = call.args[0], _keyword(call, "advice")
        texts = _texts(problem, own)
        if texts or (isinstance(remedy, ast.Name) and remedy.id in own):
            return Maker(function.name, own, texts, defaults, problem, remedy, scope)
    elif (through := _meant(call, scope, known)) is not None and through.name != function.name:
        given = _given(call, through)
        texts = tuple(name for text in through.texts if text in given for name in _texts(given[text], own))
        if texts:
            return Maker(function.name, own, texts, defaults, call, None, scope, through)
    return None


def _texts(problem: ast.expr, own: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters that are the problem, or the part of it that is called so."""
    whole = (problem.id,) if isinstance(problem, ast.Name) else ("problem",)
    return tuple(name for name in whole if name in own and name in _names(problem))


def _of_places(file: str, places: Iterable[Place], makers: list[Maker]) -> Iterator[Message]:
    own = {maker.name for maker in makers if maker.scope.file == file}
    for node, scope, function in places:
        if isinstance(node, ast.Call):
            if function is None or function.name not in own:
                yield from _of_call(node, scope, makers)
        elif function is not None and isinstance(node, ast.Yield | ast.Return):
            yield from _reason(node, scope, function)


def _reason(node: ast.Yield | ast.Return, scope: Scope, function: Function) -> Iterator[Message]:
    """Yield what a function that gives reasons yields or returns at a place."""
    returns = ast.unparse(function.returns) if function.returns is not None else ""
    if returns not in REASONS or function.name in NO_REASONS:
        return
    if isinstance(node.value, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp):
        said = text(node.value, scope)
        if said.count(" ") > 1:
            yield Message(scope.file, node.lineno, said, SUPERSEDED if "native" in function.name else LISTED)


def _of_call(call: ast.Call, scope: Scope, makers: list[Maker]) -> Iterator[Message]:
    if called(call) in ERRORS:
        if call.args:
            problem, remedy = text(call.args[0], scope), text(_keyword(call, "advice"), scope)
            relayed = problem.startswith("‹") and problem.count("‹") == 1 and problem.endswith("›")
            yield Message(scope.file, call.lineno, problem, remedy or RELAYED * relayed)
    elif (maker := _meant(call, scope, makers)) is not None:
        given = {name: text(value, scope) for name, value in _given(call, maker, scope).items()}
        yield Message(scope.file, call.lineno, *_made(maker, given))


def _made(maker: Maker, given: Mapping[str, str]) -> tuple[str, str]:
    """Return problem and remedy of the error that a maker makes, from the texts of its arguments."""
    if maker.through is None:
        return text(maker.problem, maker.scope, given), text(maker.remedy, maker.scope, given)
    assert isinstance(maker.problem, ast.Call)
    inner = _given(maker.problem, maker.through, maker.scope)
    return _made(maker.through, {name: text(value, maker.scope, given) for name, value in inner.items()})


def _given(call: ast.Call, maker: Maker, scope: Scope | None = None) -> dict[str, ast.expr]:
    """Return the arguments of a call by parameter, defaults included; a pair of constants after ``*`` counts as two."""
    arguments: list[ast.expr] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            values = scope.values.get(ast.unparse(argument.value), []) if scope else []
            arguments += values[0].elts if values and isinstance(values[0], ast.Tuple) else []
        else:
            arguments.append(argument)
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {**maker.defaults, **dict(zip(maker.parameters, arguments, strict=False)), **named}


def _meant(call: ast.Call, scope: Scope, makers: list[Maker]) -> Maker | None:
    """Return the maker that a call means: one of this file, or of the module that the name is imported from."""
    candidates = [maker for maker in makers if maker.name == called(call)]
    base = (
        call.func.value.id
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        else ""
    )
    source = (
        scope.imported.get(base, "") + f".{base}"
        if base in scope.imported
        else scope.imported.get(called(call), "")
    )
    job = (
        "_shared.verl_config" if base == "job" or (isinstance(call.func, ast.Attribute) and not base) else ""
    )
    for maker in candidates:
        module = maker.scope.file.removesuffix(".py").replace("/", ".")
        if maker.scope.file == scope.file and base in ("", "self"):
            return maker
        if (source and module.endswith(source)) or (job and module.endswith(job)):
            return maker
    return None


def called(call: ast.Call) -> str:
    """Return the last part of the name that a call calls."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _names(node: ast.expr | None) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)] if node is not None else []
