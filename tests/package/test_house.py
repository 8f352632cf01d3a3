"""Rules of the tree that no formatter checks: names, sizes, the index, tests of each patch, one name to import."""

import re
from pathlib import Path

import pytest
import tests_for
from tree import TREE

from flashpatch import _index, registry, write_index

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


def test_the_index_is_up_to_date() -> None:
    written = write_index.text(registry.built_in().values())
    assert Path(_index.__file__).read_text() == written, "run: python -m flashpatch.write_index"


@pytest.mark.parametrize("id", registry.patches())
def test_each_patch_has_tests_that_exist(id):
    environment, (_, marks, _, _, *paths) = tests_for.tests_for(registry.patches()[id])
    assert paths and all((TREE / path).exists() for path in paths)
    assert environment in (
        ("-sglang", "-sglang-0.5.12") if "sglang" in marks.partition(" or ")[0] else ("-0.24", "")
    )


@pytest.mark.parametrize("name", ["patches", "verify"])
def test_a_folder_of_the_tree_is_no_module(name: str, editable, tree: Path) -> None:
    done = editable.run("python", "-c", f"import {name}", cwd=tree)
    assert done.returncode == 1
    assert f"import it as 'flashpatch.{name}'" in done.stderr
    assert editable.python(f"import flashpatch.{name}", cwd=tree) == ""
