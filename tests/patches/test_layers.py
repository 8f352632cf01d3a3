"""Which rooms may import which, read from the sources: an import inside a function counts as well."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree import TREE

FRAMEWORK_FOLDERS = {"vllm", "vllm_lora", "sglang", "sglang_lora", "verl", "verl_vllm", "verl_sglang"}
FRAMEWORK_FOLDERS |= {"vllm_0_24", "sglang_0_5_12", "verl_sglang_0_5_12"}
ROOMS = {"flashpatch": "flashpatch", "patches": "flashpatch.patches", "verify": "flashpatch.verify"}


def _modules() -> dict[str, Path]:
    """Dotted name to file, of every module of the package."""
    found = {}
    for folder, name in ROOMS.items():
        for path in (TREE / folder).rglob("*.py"):
            if "sitecustomize" not in path.parts:
                parts = path.relative_to(TREE / folder).with_suffix("").parts
                found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = _modules()
FAMILIES = sorted(
    name.split(".")[2] for name in MODULES if name.startswith("flashpatch.patches.") and name.count(".") == 2
)


def _statements(tree: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements of a module, without those for type checkers; ``lazy``: in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for part in node.orelse for found in _statements(part, lazy))
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _statements(node, lazy)


def imports_of(source: str, modules: dict[str, Path], lazy: bool = True) -> set[str]:
    """The modules of the package that a module's source imports."""
    found = set()
    for node in _statements(ast.parse(source), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert not node.level, "the package imports by full names"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in modules else node.module or "")
    return found & modules.keys()


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a path that ends where it begins; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for below in sorted(graph[name]):
            if found := visit(below, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


GRAPH = {name: imports_of(path.read_text(), MODULES) for name, path in MODULES.items()}
EDGES = [(name, below) for name, imported in GRAPH.items() for below in imported]


def _place(name: str) -> tuple[str, str]:
    """The family of a module below ``patches`` and its folder there; empty where it has none."""
    parts = name.split(".")
    family = parts[2] if len(parts) > 2 and parts[1] == "patches" else ""
    return family, parts[3] if len(parts) > 4 or (
        len(parts) == 4 and MODULES[name].stem == "__init__"
    ) else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neutral_core_imports_no_framework_folder(family: str) -> None:
    wrong = []
    for name, below in EDGES:
        (own, folder), (other, target) = _place(name), _place(below)
        in_core = own == family and folder and folder not in FRAMEWORK_FOLDERS
        if in_core and other == family and target in FRAMEWORK_FOLDERS:
            wrong.append(f"{name} imports {below}")
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_imports_another(family: str) -> None:
    wrong = [
        f"{name} imports {below}"
        for name, below in EDGES
        if _place(name)[0] == family and _place(below)[0] not in ("", "_shared", family)
    ]
    assert not wrong


def test_no_import_cycle() -> None:
    """Not by an import inside a function either."""
    assert not cycle_in(GRAPH)
