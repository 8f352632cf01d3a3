"""Check a patch's contract against the framework's source, by syntax alone.

Nothing of the framework is imported: the same check serves the engine before it wraps, and
``flashpatch-verify --against`` on a wheel that is not installed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from flashpatch.contracts.source import Definition, SourceError, Sources
from flashpatch.record import Patch

Code = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class ContractResult:
    """The answer of `check`.

    Attributes:
        ok: whether the contract holds.
        target: the target to patch, as ``"package.module:Qual.name"``: the first of the patch's targets that exists, moved to the
            module of the same package that defines it when the listed one only re-exports it. Empty when none exists.
        drift: what no longer holds, one sentence per finding joined with ``"; "``, each with ``file:line``.
        line: ``file:line`` of the first finding, or of the target when all holds."""

    ok: bool
    target: str
    drift: str = ""
    line: str = ""


@dataclass(frozen=True)
class _Finding:
    text: str
    line: str

    def __str__(self) -> str:
        return f"{self.text} ({self.line})"


def check(patch: Patch, sources: Sources, version: str | None = None) -> ContractResult:
    """Check ``patch.contract`` from source; never raises for what the source holds.

    ``sources`` tells afterwards which files the answer depends on. ``version`` is exact, for ``contract.since``; None
    asks for all that any version must have."""
    try:
        return _check(patch, sources, version)
    except SourceError as error:
        text = str(error)
        return ContractResult(False, "", text, text.split(" ", 1)[0])


def installed_root(package: str) -> Path | None:
    """Directory of an installed top-level package (the file, for a one-file module), without importing it.

    Looking up a top-level name runs the import finders only, never the package; finders rather than
    ``sys.path`` alone, so that editable installs are found too."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _check(patch: Patch, sources: Sources, version: str | None) -> ContractResult:
    absent: list[_Finding] = []
    for target in patch.targets:
        found = sources.resolve(target)
        if found.definitions:
            break
        absent.append(_Finding(f"{target} is gone: no {found.missing}", found.line))
    else:
        return ContractResult(False, "", "; ".join(map(str, absent)), absent[0].line if absent else "")
    findings = list(_findings(patch, sources, target, found.definitions, version))
    chosen = _defining(target, sources)
    if findings:
        return ContractResult(False, chosen, "; ".join(map(str, findings)), findings[0].line)
    return ContractResult(True, chosen, line=found.definitions[0].line)


def _findings(
    patch: Patch, sources: Sources, target: str, definitions: tuple[Definition, ...], version: str | None
) -> Iterator[_Finding]:
    contract = patch.contract
    if contract.params or contract.mentions:
        bodies = [(d, d.node) for d in definitions if isinstance(d.node, Code)]
        if not bodies:
            yield _Finding(f"{target} is no longer a function or class in this source", definitions[0].line)
        for definition, node in bodies:
            accepted, line = _accepted(definition, sources)
            for name in contract.params:
                if name not in accepted:
                    yield _Finding(f"{target} no longer takes {name!r}", line)
            present = _mentioned(node) if contract.mentions else set()
            for name in contract.mentions:
                if name not in present:
                    yield _Finding(f"{target} no longer mentions {name}", definition.line)
    for other in _wanted(patch, version):
        found = sources.resolve(other)
        if not found.definitions and not _is_elsewhere(other, target, sources):
            yield _Finding(f"{other} is gone: no {found.missing}", found.line)


def _wanted(patch: Patch, version: str | None) -> Iterator[str]:
    """Names that must exist in ``version``; all that any version must have if it is unknown."""
    yield from patch.contract.exists
    for least, names in patch.contract.since.items():
        if version is None or _order(version) >= Version(least):
            yield from names


def _order(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:  # of a source without metadata
        return Version("9999")


def _is_elsewhere(other: str, target: str, sources: Sources) -> bool:
    """Whether ``other`` is of a package that is not at hand, and not the target's, so that whatever uses it does not run here."""
    package = other.partition(":")[0].partition(".")[0]
    return package != target.partition(".")[0] and sources.roots.get(package) is None


def _accepted(definition: Definition, sources: Sources) -> tuple[set[str], str]:
    """Parameter names a definition takes and the line that says so; for a class those of its ``__init__``,
    or its annotated fields when no class of the family writes one."""
    if isinstance(definition.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        args = definition.node.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        return {arg.arg for arg in named if arg is not None}, definition.line
    family = sources.classes(definition)
    for owner, node in family:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return _accepted(Definition(owner.module, f"{owner.qualname}.__init__", statement), sources)
    fields = (s.target for _, node in family for s in node.body if isinstance(s, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}, definition.line


def _mentioned(node: Code) -> set[str]:
    """Names, attribute names, dotted expressions, keywords, imported and nested definitions in a body."""
    found: set[str] = set()
    for inner in (inner for statement in node.body for inner in ast.walk(statement)):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.update((inner.attr, _dotted(inner) or ast.unparse(inner)))
        elif isinstance(inner, ast.keyword) and inner.arg:
            found.add(inner.arg)
        elif isinstance(inner, ast.alias):
            found.update((inner.name, inner.asname or inner.name))
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(inner.name)
    return found


def _dotted(node: ast.expr) -> str | None:
    """``"a.b.c"``, as ``ast.unparse`` has it and quicker; None for an attribute of anything but a name."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return None
    inner = _dotted(node.value)
    return f"{inner}.{node.attr}" if inner is not None else None


def _defining(target: str, sources: Sources) -> str:
    """``target`` moved to the module that defines its first name, when exactly one of the same package does.

    The outer name moves, never a method to the base class that defines it: wrapping there would reach other subclasses."""
    module, _, qualname = target.partition(":")
    head, _, rest = qualname.partition(".")
    found = sources.resolve(f"{module}:{head}").definitions
    if len(found) != 1 or not found[0].qualname or "." in found[0].qualname:
        return target
    home = found[0].module.name
    if home == module or home.partition(".")[0] != module.partition(".")[0]:
        return target
    return f"{home}:{found[0].qualname}.{rest}" if rest else f"{home}:{found[0].qualname}"
