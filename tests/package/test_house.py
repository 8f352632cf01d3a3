"""Rules of the tree that no formatter checks."""

import re

import pytest
from tree import TREE

from flashpatch import registry

CODE = [
    path
    for top in ("flashpatch", "patches", "verify", "examples", "benchmarks", "tests")
    for path in (TREE / top).rglob("*.py")
]
LONGEST = 400


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


@pytest.mark.parametrize("id", sorted(registry.patches()))
def test_an_id_names_the_upstream_function_or_class(id: str) -> None:
    places = [target.partition(":")[2].split(".") for target in registry.patches()[id].targets]
    names = [_snake(at[-1] if at[-1] != "__init__" else f"{at[-2]}_init") for at in places]
    assert any(name in id.split(".", 2)[2] for name in names)


def test_no_file_is_longer_than_a_screenful_of_ideas() -> None:
    long = {
        str(path.relative_to(TREE)): n for path in CODE if (n := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}
