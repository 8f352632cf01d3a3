"""Find definitions in a Python source tree by syntax alone; nothing of that tree is imported."""

from __future__ import annotations

import ast
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RootFor = Callable[[str], "Path | str | None"]
Stamp = tuple[int, int, int, int]
"""What tells a file from a changed one: size, times of modification and of change in ns, inode."""

Compound = ast.If | ast.Try | ast.TryStar | ast.With | ast.For | ast.While

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 40


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file or directory that is there; else OSError."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class SourceError(Exception):
    """A source file is there but cannot be read as Python; the message names file and line."""


@dataclass(frozen=True)
class Module:
    """One parsed file. ``label`` is its path from the directory that holds the package: ``vllm/v1/x.py``."""

    name: str
    path: Path
    label: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Imported:
    """A name bound by an import statement: ``name`` of module ``source``, or the module itself when None."""

    source: str
    level: int
    name: str | None
    lineno: int


@dataclass(frozen=True)
class Definition:
    """What a name stands for: the node that defines it, and where.

    ``node`` is a function, class or assignment; a whole module; or an `Imported` that leads out of the
    sources at hand. ``qualname`` is the name inside the defining module."""

    module: Module
    qualname: str
    node: ast.AST | Imported

    @property
    def line(self) -> str:
        return f"{self.module.label}:{getattr(self.node, 'lineno', 1)}"


@dataclass(frozen=True)
class Resolution:
    """All definitions a target may stand for (several when they are conditional); when there are none,
    ``missing`` says what was not found and ``line`` where the search ended."""

    definitions: tuple[Definition, ...]
    missing: str = ""
    line: str = ""


class Sources:
    """Definitions by name over the packages that ``root_for`` can locate.

    ``root_for(top_level_name)`` returns the package's directory (or, for a top-level module of one file,
    that file), or None when its source is not at hand.

    Attributes:
        roots: packages that were asked for, with what ``root_for`` said.
        read: files that were read, with their stamps from before that.
        absent: files that were looked for and are not there."""

    def __init__(self, root_for: RootFor) -> None:
        self._root_for = root_for
        self.roots: dict[str, Path | str | None] = {}
        self.read: dict[str, Stamp] = {}
        self.absent: set[str] = set()

    def module(self, name: str) -> Module | None:
        """The parsed module ``name``, or None when there is no such file. Raises `SourceError`."""
        top, _, rest = name.partition(".")
        if top not in self.roots:
            self.roots[top] = self._root_for(top)
        root = self.roots[top]
        if root is None:
            return None
        root = Path(root)
        if root.is_file():
            candidates = [] if rest else [root]
        elif rest:
            inner = root.joinpath(*rest.split("."))
            candidates = [inner / "__init__.py", inner.with_name(inner.name + ".py")]
        else:
            candidates = [root / "__init__.py"]
        for path in candidates:
            if path.is_file():
                label = path.relative_to(root.parent).as_posix()
                known = self.read.setdefault(str(path), stamp(path))
                return Module(name, path, label, _parse(path, label, known))
            self.absent.add(str(path))
        return None

    def resolve(self, target: str) -> Resolution:
        """Follow ``"package.module:Qual.name"`` to its definitions. Raises `SourceError`."""
        module_name, _, qualname = target.partition(":")
        module = self.module(module_name)
        if module is None:
            return Resolution((), f"module {module_name}", module_name.replace(".", "/") + ".py")
        places = [Definition(module, "", module.tree)]
        for part in qualname.split("."):
            found = [inner for place in places for inner in self._member(place, part, 0)]
            if not found:
                owner = f" in {places[0].qualname}" if places[0].qualname else ""
                return Resolution((), f"{part!r}{owner}", places[0].line)
            places = found
        return Resolution(tuple(dict.fromkeys(places)))

    def classes(self, place: Definition) -> list[tuple[Definition, ast.ClassDef]]:
        """The class and its bases with their nodes, nearest first, as far as their source is at hand."""
        order: dict[Definition, ast.ClassDef] = {}
        self._collect_bases(place, order)
        return list(order.items())

    def _collect_bases(self, place: Definition, order: dict[Definition, ast.ClassDef]) -> None:
        if place in order or not isinstance(place.node, ast.ClassDef):
            return
        order[place] = place.node
        for base in place.node.bases:
            for found in self._expression(place.module, base, 0):
                self._collect_bases(found, order)

    def _member(self, place: Definition, name: str, depth: int) -> list[Definition]:
        if isinstance(place.node, ast.Module):
            return self._global(place.module, name, depth)
        family = self.classes(place)
        for owner, node in family:
            found = self._scope(owner, bindings(node.body).get(name, ()), name, depth)
            if found:
                return found
        for owner, node in family:
            assigned = _instance_attribute(node, name)
            if assigned is not None:
                return [Definition(owner.module, f"{owner.qualname}.{name}", assigned)]
        return []

    def _global(self, module: Module, name: str, depth: int) -> list[Definition]:
        if depth > _DEEPEST:
            return []
        bound = _module_bindings(module.tree)
        here = Definition(module, "", module.tree)
        if name in bound:
            return self._scope(here, bound[name], name, depth)
        if module.path.name == "__init__.py":
            submodule = self.module(f"{module.name}.{name}")
            if submodule is not None:
                return [Definition(submodule, "", submodule.tree)]
        for star in bound.get("*", ()):
            source = self.module(_absolute(module, star)) if isinstance(star, Imported) else None
            found = self._global(source, name, depth + 1) if source is not None else []
            if found:
                return found
        return []

    def _scope(
        self, owner: Definition, nodes: Iterable[ast.AST | Imported], name: str, depth: int
    ) -> list[Definition]:
        """Definitions behind the ``nodes`` that bind ``name`` in ``owner``, imports and aliases followed."""
        found: list[Definition] = []
        prefix = f"{owner.qualname}." if owner.qualname else ""
        for node in nodes:
            place = Definition(owner.module, prefix + name, node)
            followed: list[Definition] = []
            near = depth <= _DEEPEST
            if near and isinstance(node, Imported):
                followed = self._imported(owner.module, node, depth)
            elif near and isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                followed = self._alias(owner, name, node.value, depth)
            found.extend(followed or [place])
        return found

    def _imported(self, module: Module, imported: Imported, depth: int) -> list[Definition]:
        source = self.module(_absolute(module, imported))
        if source is None:
            return []
        if imported.name is None:
            return [Definition(source, "", source.tree)]
        return self._global(source, imported.name, depth + 1)

    def _alias(self, owner: Definition, name: str, value: ast.expr, depth: int) -> list[Definition]:
        if isinstance(owner.node, ast.ClassDef) and isinstance(value, ast.Name) and value.id != name:
            inner = bindings(owner.node.body).get(value.id)
            if inner:
                return self._scope(owner, inner, value.id, depth + 1)
        return self._expression(owner.module, value, depth + 1)

    def _expression(self, module: Module, value: ast.expr, depth: int) -> list[Definition]:
        """Definitions behind ``Name``, ``a.b.Name`` or ``Name[...]`` read at module level."""
        if depth > _DEEPEST:
            return []
        if isinstance(value, ast.Subscript):
            return self._expression(module, value.value, depth)
        if isinstance(value, ast.Name):
            return self._global(module, value.id, depth + 1)
        if isinstance(value, ast.Attribute):
            owners = self._expression(module, value.value, depth)
            return [inner for owner in owners for inner in self._member(owner, value.attr, depth + 1)]
        return []


def bindings(body: list[ast.stmt]) -> dict[str, list[ast.AST | Imported]]:
    """Name to the nodes that may bind it in one scope; star imports are under ``"*"``.

    A plain definition replaces what came before it, a conditional one adds to it: what remains are all the
    definitions the running program may end up with."""
    found: dict[str, list[ast.AST | Imported]] = {}
    for statement in body:
        if isinstance(statement, Compound):
            for branch in _branches(statement):
                for name, nodes in bindings(branch).items():
                    found.setdefault(name, []).extend(nodes)
            continue
        for name, node in _bound(statement):
            if name == "*":
                found.setdefault("*", []).append(node)
            else:
                found[name] = [node]
    return found


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.AST | Imported]]:
    if isinstance(statement, _FUNCTIONS):
        if not any(getattr(d, "attr", None) in ("setter", "deleter") for d in statement.decorator_list):
            yield statement.name, statement
    elif isinstance(statement, ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign):
        for name in _names(statement.targets):
            yield name, statement
    elif isinstance(statement, ast.AnnAssign):
        for name in _names([statement.target]):
            yield name, statement
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            member = None if alias.name == "*" else alias.name
            imported = Imported(statement.module or "", statement.level, member, statement.lineno)
            yield alias.asname or alias.name, imported
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or module, Imported(module, 0, None, statement.lineno)


def _names(targets: list[ast.expr]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, (ast.Tuple, ast.List)):
            yield from _names(target.elts)


def _branches(statement: Compound) -> Iterator[list[ast.stmt]]:
    """Bodies of a compound statement that may run; the body under ``if TYPE_CHECKING`` never does."""
    test = getattr(statement, "test", None)
    if getattr(test, "id", getattr(test, "attr", None)) != "TYPE_CHECKING":
        yield statement.body
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    yield getattr(statement, "orelse", [])
    yield getattr(statement, "finalbody", [])


def _instance_attribute(owner: ast.ClassDef, name: str) -> ast.stmt | None:
    for method in owner.body:
        if not isinstance(method, _FUNCTIONS) or not method.args.args:
            continue
        this = method.args.args[0].arg
        for node in ast.walk(method):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            members = [target for target in targets if isinstance(target, ast.Attribute)]
            if any(one.attr == name and getattr(one.value, "id", None) == this for one in members):
                return node
    return None


def _absolute(module: Module, imported: Imported) -> str:
    if not imported.level:
        return imported.source
    package = module.package.split(".")
    parents = package[: len(package) - imported.level + 1]
    return ".".join([*parents, imported.source] if imported.source else parents)


@functools.lru_cache(maxsize=32)
def _parse(path: Path, label: str, known: Stamp) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=label)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise SourceError(f"{label}:{line} cannot be read as Python: {error}") from error


@contextmanager
def without_collector() -> Iterator[None]:
    """Parse without Python's cycle collector: syntax trees have no cycles, and beside an imported framework
    their many nodes set off collections that take several times as long as the parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def forget() -> None:
    """Give back the memory of parsed sources: some 40 MB for a large framework."""
    _module_bindings.cache_clear()
    _parse.cache_clear()


@functools.lru_cache(maxsize=32)
def _module_bindings(tree: ast.Module) -> dict[str, list[ast.AST | Imported]]:
    return bindings(tree.body)
