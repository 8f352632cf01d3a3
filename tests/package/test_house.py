"""Rules of the tree that no formatter checks: names, sizes, the index, tests of each patch, one name to import."""

import ast
import re
from pathlib import Path

import pytest
import tests_for
from tree import TREE

from flashpatch import _index, registry, write_index
from flashpatch.arming.preflight import packages

CODE = [
    path
    for top in ("flashpatch", "patches", "verify", "examples", "benchmarks", "tests")
    for path in (TREE / top).rglob("*.py")
]
LONGEST = 60


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


@pytest.mark.parametrize("id", sorted(registry.patches()))
def test_an_id_names_the_upstream_function_or_class(id: str) -> None:
    places = [target.partition(":")[2].split(".") for target in registry.patches()[id].targets]
    names = [_snake(at[-1] if at[-1] != "__init__" else f"{at[-2]}_init") for at in places]
    assert any(name in id.split(".", 2)[2] for name in names)


def test_patches_that_are_armed_together_have_targets_in_one_package() -> None:
    """The import of any target arms all: one in SGLang beside others in verl would refuse SGLang where verl is not installed."""
    groups: dict[tuple[str, str], set[str]] = {}
    for patch in registry.patches().values():
        groups.setdefault((patch.family, patch.framework), set()).update(packages(patch))
    assert not {group: found for group, found in groups.items() if len(found) > 1}


def test_no_function_is_longer_than_a_screenful() -> None:
    """A file is cut by question; a function's docstring does not count."""
    long = {}
    for path in (path for path in CODE if "tests" not in path.relative_to(TREE).parts):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = one.body[0] if ast.get_docstring(one, clean=False) else None
                lines = (
                    one.end_lineno
                    - one.lineno
                    - (documented.end_lineno - documented.lineno if documented else 0)
                )
                long |= {f"{path.relative_to(TREE)}:{one.name}": lines} if lines >= LONGEST else {}
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
