"""`make test-for` knows tests for every patch."""

from __future__ import annotations

import tests_for
from tree import TREE

from flashpatch import registry


def test_each_patch_has_tests_that_exist():
    for id, patch in registry.patches().items():
        lines = tests_for.tests_for(patch)
        for arguments in lines.values():
            paths = [one.partition("::")[0] for one in arguments if one.startswith("tests/")]
            assert paths and all((TREE / path).exists() for path in paths), id
        assert len(lines) == 2 or id.split(".")[1] in ("trl", "swift", "prime_rl"), id
