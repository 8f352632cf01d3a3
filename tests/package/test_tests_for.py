"""`make test-for` knows tests for every patch."""

import pytest
import tests_for
from tree import TREE

from flashpatch import registry


@pytest.mark.parametrize("id", registry.patches())
def test_each_patch_has_tests_that_exist(id):
    environment, (_, marks, _, _, *paths) = tests_for.tests_for(registry.patches()[id])
    assert paths and all((TREE / path).exists() for path in paths)
    assert environment in (
        ("-sglang", "-sglang-0.5.12") if "sglang" in marks.partition(" or ")[0] else ("-0.24", "")
    )
