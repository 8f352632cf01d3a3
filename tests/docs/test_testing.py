"""Each file in the table of `docs/develop/testing.md` has a test that its column runs, by the marks in its source.

And a file that needs a library is skipped without it, as that page says."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from marked_files import may_match
from tree import SUPPORT, TREE

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


IMPORTED = {"torch": "skipped", "helper": "skipped", "flashpatch_own": "error", "unheard_of": "error"}


@pytest.mark.parametrize(("imported", "end"), IMPORTED.items())
def test_a_file_is_skipped_without_torch_unless_flashpatch_wants_it(tmp_path: Path, imported, end) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    for name in ("helper", "flashpatch_own"):
        (tmp_path / f"{name}.py").write_text("import torch")
    (tmp_path / "test_it.py").write_text(f"import {imported}\ndef test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "marked_files", "-q", "-c", os.devnull, "test_it.py"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SUPPORT}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert f"1 {end} in " in done.stdout, done.stdout
