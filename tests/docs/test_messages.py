"""Each refusal is among the messages of the reference, with a remedy; the troubleshooting page quotes what is printed."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from tree import TREE

from flashpatch import record

sys.path.insert(0, str(TREE / "docs" / "site"))
import messages
import source_text

PAGE = (TREE / "docs" / "how-to" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| (`.*?) \| .* \| .* \|$", PAGE, re.M)


@cache
def found() -> tuple[messages.Message, ...]:
    return tuple(messages.messages(TREE))


def sources() -> list[Path]:
    return [path for root in messages.ROOTS for path in sorted((TREE / root).rglob("*.py"))]


@cache
def printed() -> str:
    """All that strings of the sources say, and what f-strings print between their values."""
    nodes = (node for path in sources() for node in ast.walk(ast.parse(path.read_text())))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return "\n".join(one for one in constants if isinstance(one, str))


def test_every_message_says_what_to_do():
    without = [f"{one.file}:{one.line} {one.problem}" for one in found() if not one.remedy.strip("‹› ")]
    assert not without


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, source_text.Function):
                yield str(path.relative_to(TREE)), node


def lead_to_an_entry(places: set[tuple[str, int]]) -> set[str]:
    """Return the names of functions that hold an entry, or call one that does."""
    known: set[str] = set()
    calls: dict[str, set[str]] = {}
    for file, function in functions():
        calls[function.name] = {messages.called(n) for n in ast.walk(function) if isinstance(n, ast.Call)}
        if any((file, line) in places for line in range(function.lineno, (function.end_lineno or 0) + 1)):
            known.add(function.name)
    return known | {name for name, called in calls.items() if called & known}


def test_every_error_that_is_raised_is_among_them():
    """A raise of the exception, or of what a function returns, has an entry where it stands or in that function."""
    places = {(one.file, one.line) for one in found()}
    makers = {(maker.scope.file, maker.name) for maker in messages.makers(TREE)}
    leading = lead_to_an_entry(places) | RAISED_AGAIN
    missing, raised = [], 0
    for path in sources():
        file, module = str(path.relative_to(TREE)), ast.parse(path.read_text())
        for node, _, function in source_text.nodes(module, source_text.Scope(file)):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = messages.called(node.exc)
            if name not in messages.ERRORS and not name.lstrip("_")[:1].islower():
                continue
            raised += 1
            known = (file, node.exc.lineno) in places or (name not in messages.ERRORS and name in leading)
            if not known and (file, getattr(function, "name", "")) not in makers:
                missing.append(f"{file}:{node.lineno} {ast.unparse(node)[:80]}")
    assert raised > 200
    assert not missing


def test_no_class_of_errors_is_left_out():
    nodes = (node for path in sources() for node in ast.walk(ast.parse(path.read_text())))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    derived = {one.name for one in classes if "PatchError" in [getattr(b, "id", "") for b in one.bases]}
    assert derived | {"PatchError"} == set(messages.ERRORS)


RAISED_AGAIN = {"_explained", "copy"}
"""What makes an error of Ray's, and what raises a refusal once more."""


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("type(error).__name__", "error"),
        ("', '.join(sorted(self.tensor_names)[:4])", "tensor names"),
        ("get(f'{ROLLOUT}.quantization')", "quantization"),
    ],
)
def test_the_page_calls_what_varies_by_a_word(expression, word):
    assert messages.word(expression) == word
    assert "(" not in messages._cell(f"found ‹{expression}›")


def test_the_page_of_trouble_has_every_state():
    assert set(get_args(record.StateWord)) - {"live"} <= set(re.findall(r"^\| `(\w+)", PAGE, re.M))


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_page_quotes_what_is_printed(quoted):
    for cell in re.findall(r"`([^`]+)`", quoted):
        for part in re.split(r"\.\.\.|[():]|, though", cell):
            words = part.strip(" ,")
            if " " in words:
                assert words in printed(), words
