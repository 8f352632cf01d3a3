"""Leave out test files of which `-m` selects no test, without importing them: most of a lane's collection time.

And skip those that import a library of `LIBRARIES` where it is not installed."""

import itertools
import re
import traceback
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

OF_THE_FILE = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"\bmark\.(\w+)")
COMPUTED = "getattr(pytest.mark"
LIBRARIES = ("torch", "transformers", "ray")


class File(pytest.Module):
    """A test file, skipped if it or what supports it imports a missing library; FlashPatch itself may not."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            cause = error.__cause__
            if not isinstance(cause, ModuleNotFoundError) or cause.name not in LIBRARIES:
                raise
            frames = traceback.walk_tb(cause.__traceback__)
            if any(frame.f_globals["__name__"].startswith("flashpatch") for frame, _ in frames):
                raise
        pytest.skip(f"{cause.name} is not installed")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> File:
    return File.from_parent(parent, path=module_path)


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
