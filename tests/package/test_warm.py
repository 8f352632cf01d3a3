"""Which variables tell servers of warm interpreters apart."""

from __future__ import annotations

import os

import pytest
import warm


def test_only_what_an_import_added_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_ADDED", "by an import of this process")
    asked = {"TORCH_COMPILE_DISABLE": "1", "TRITON_ADDED": os.environ["TRITON_ADDED"]}
    assert "TRITON_ADDED" not in warm._given(asked)
    with monkeypatch.context() as patch:  # as probes run: what a test gives is not what this process has
        patch.setattr("os.environ", {"TORCH_COMPILE_DISABLE": "1"})
        assert warm._given(asked)["TORCH_COMPILE_DISABLE"] == "1"
