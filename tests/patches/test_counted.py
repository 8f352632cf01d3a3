"""A patch without a wrapper that is due in jobs counts its calls itself: else ``--live`` would call every such job unproven."""

import importlib
import inspect

import pytest

from flashpatch import registry
from flashpatch.record import Patch

DUE = [
    patch
    for family in registry.families().values()
    for patch in family.patches
    if patch.wrapper is None and patch.evidence in ("update", "step")
]


@pytest.mark.parametrize("patch", DUE, ids=lambda patch: patch.id)
def test_a_due_patch_without_a_wrapper_counts_its_calls(patch: Patch) -> None:
    assert patch.apply is not None
    source = inspect.getsource(importlib.import_module(patch.apply.__module__))
    assert "record_call(" in source
