"""Each file in the table of `docs/develop/testing.md` has a test that its column runs, by the marks in its source."""

import ast
import re
from collections.abc import Iterator

import pytest
from marked_files import may_match
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


def each_test(source: str) -> Iterator[str]:
    """Yield the source as each test's own: what always marks it stands as a mark of the file; parameters may have any."""
    tree = ast.parse(source)
    of_file = [ast.unparse(one) for one in tree.body if ast.unparse(one).startswith("pytestmark = ")]
    for node in ast.walk(tree):
        is_machine = isinstance(node, ast.ClassDef) and not any(
            isinstance(one, ast.FunctionDef) for one in node.body
        )
        if (isinstance(node, ast.FunctionDef) or is_machine) and node.name.lower().startswith("test"):
            marks = [one for one in map(ast.unparse, node.decorator_list) if "mark." in one]
            fixed = [f"pytestmark = {one}" for one in marks if "parametrize" not in one]
            yield "\n".join([*of_file, *fixed, *([source] if len(fixed) < len(marks) else [])])


@pytest.mark.parametrize(("path", "marks"), cells())
def test_a_named_file_has_a_test_of_its_column(path: str, marks: str) -> None:
    source = (TREE / "tests" / path).read_text()
    assert any(may_match(test, marks) for test in each_test(source))
