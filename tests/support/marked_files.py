"""Leave out test files of which `-m` selects no test, without importing them: most of a lane's collection time."""

import itertools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

OF_THE_FILE = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"\bmark\.(\w+)")
COMPUTED = "getattr(pytest.mark"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Return True for a test file none of whose tests can match ``-m``; None leaves the answer to others."""
    wanted = config.getoption("markexpr")
    if not wanted or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return None if may_match(collection_path.read_text(encoding="utf-8"), wanted) else True


def may_match(source: str, wanted: str) -> bool:
    """Whether a test in this source may have marks for which the expression ``wanted`` holds."""
    names = set(re.findall(r"\w+", wanted)) - {"and", "or", "not"}
    of_all = names.intersection(mark for line in OF_THE_FILE.findall(source) for mark in MARK.findall(line))
    of_some = names if COMPUTED in source else names.intersection(MARK.findall(source))
    free = sorted(of_some - of_all)
    expression = Expression.compile(wanted)
    return any(
        expression.evaluate(lambda name, **_: name in of_all or name in chosen)
        for size in range(len(free) + 1)
        for chosen in itertools.combinations(free, size)
    )
