"""FlashPatch is importable under one name, so that no module exists twice in a process."""

from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["patches", "verify"])
def test_a_folder_of_the_tree_is_no_module(name: str, editable, tree: Path) -> None:
    done = editable.run("python", "-c", f"import {name}", cwd=tree)
    assert done.returncode == 1
    assert f"import it as 'flashpatch.{name}'" in done.stderr
    assert editable.python(f"import flashpatch.{name}", cwd=tree) == ""
