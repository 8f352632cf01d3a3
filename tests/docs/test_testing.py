"""Each file in the table of `docs/develop/testing.md` has a test that its column runs, by the marks in its source."""

import re

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


@pytest.mark.parametrize(("path", "marks"), cells())
def test_a_named_file_has_a_test_of_its_column(path: str, marks: str) -> None:
    assert may_match((TREE / "tests" / path).read_text(), marks)
