"""Each file in the table of `docs/develop/testing.md` has a test that its column runs, by the marks in its source."""

import ast
import itertools
import re

import pytest
from _pytest.mark.expression import Expression
from tree import TREE

PAGE = (TREE / "docs" / "develop" / "testing.md").read_text()
TABLE = PAGE.partition("## What covers what")[2].partition("\n## ")[0]
COLUMNS = {
    "on toys": "not vllm and not verl and not sglang and not cuda and not full",
    "on a real engine in `make test`": "(vllm or verl or sglang) and not full",
    "in `make test-full`": "full or cuda or trainer",
}


def cells() -> list[tuple[str, str]]:
    """Yield each file of the table with the marks that its column runs."""
    titles, _, *rows = (
        [*map(str.strip, line.split("|"))][2:-1] for line in TABLE.splitlines() if "|" in line
    )
    assert titles == list(COLUMNS) and len(rows) > 20
    found = [
        (path, marks)
        for row in rows
        for cell, marks in zip(row, COLUMNS.values(), strict=True)
        for path in re.findall(r"`(.+?)`", cell)
    ]
    return list(dict.fromkeys(found))


def marks_in(node: ast.AST) -> set[str]:
    return set(re.findall(r"\bmark\.(\w+)", ast.unparse(node)))


def runs(source: str, wanted: str) -> bool:
    """Whether a test of this source may have marks for which ``wanted`` holds; those of parameters may be there or not."""
    tree, expression = ast.parse(source), Expression.compile(wanted)
    of_file = {
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)
        for mark in marks_in(node.value)
    }

    def may_run(node: ast.ClassDef | ast.FunctionDef, outer: set[str]) -> bool:
        parameters = [one for one in node.decorator_list if "parametrize" in ast.unparse(one)]
        fixed = outer.union(*(marks_in(one) for one in node.decorator_list if one not in parameters))
        inside = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        if isinstance(node, ast.ClassDef) and inside:
            return any(may_run(one, fixed) for one in inside if one.name.startswith("test"))
        asked = set(re.findall(r"\w+", wanted)) - {"and", "or", "not"}
        known = asked if "getattr(pytest.mark" in source else asked & marks_in(tree)
        free = sorted(known - fixed) if parameters else []
        return any(
            expression.evaluate(lambda name, **_: name in fixed or name in chosen)
            for size in range(len(free) + 1)
            for chosen in itertools.combinations(free, size)
        )

    tests = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return any(may_run(node, of_file) for node in tests if node.name.lower().startswith("test"))


@pytest.mark.parametrize(("path", "marks"), cells())
def test_a_named_file_has_a_test_of_its_column(path: str, marks: str) -> None:
    assert runs((TREE / "tests" / path).read_text(), marks)
