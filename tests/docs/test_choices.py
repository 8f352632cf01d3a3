"""Each choice by platform or version in `patches/` has a row in `docs/reference/choices.md`, and each row a test that exists."""

import ast
import re
from collections.abc import Iterator

import pytest
from tree import TREE

PAGE = (TREE / "docs" / "reference" / "choices.md").read_text()
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| what", "| capability"))
]
PLATFORM = {"is_cpu", "is_cuda", "is_rocm", "is_available", "machine", "get_device_capability"}
KINDS = {"cpu", "cuda", "rocm"}


def is_choice(node: ast.AST) -> bool:
    """Whether a node asks for a platform, compares a kind of device, or a version."""
    if isinstance(node, ast.Attribute):
        return node.attr in PLATFORM
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        said = {getattr(part, "value", None) for part in parts if isinstance(part, ast.Constant)}
        return bool(said & KINDS) or any("Version(" in ast.unparse(part) for part in parts)
    return False


def choosing(node: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the innermost function around each choice."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if is_choice(child):
            yield inside
        yield from choosing(child, inside)


def source_choices() -> set[str]:
    found = set()
    for path in sorted((TREE / "patches").rglob("*.py")):
        name = path.relative_to(TREE / "patches").as_posix()
        if not name.startswith("cpu/"):  # for machines without an accelerator: it refuses itself elsewhere
            found |= {f"{name}:{function}" for function in choosing(ast.parse(path.read_text())) if function}
    return found


def test_each_choice_of_the_source_has_a_row() -> None:
    listed = set(re.findall(r"`([\w/]+\.py:\w+)`", PAGE))
    assert source_choices() <= listed, sorted(source_choices() - listed)
    for place in listed:
        path, _, function = place.partition(":")
        assert f"def {function}(" in (TREE / "patches" / path).read_text(), place


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_each_row_names_a_test_that_exists(row: str) -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", row)
    assert named
    for path, test in named:
        source = (TREE / "tests" / "patches" / path).read_text()
        assert re.search(rf"^ *def {test or 'test_'}", source, re.MULTILINE), (path, test)
