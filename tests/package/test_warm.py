"""Which variables tell servers of warm interpreters apart, and where a server has its socket."""

from __future__ import annotations

import os
import tempfile

import pytest
import warm


def test_only_what_an_import_added_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_ADDED", "by an import of this process")
    asked = {"TORCH_COMPILE_DISABLE": "1", "TRITON_ADDED": os.environ["TRITON_ADDED"]}
    assert "TRITON_ADDED" not in warm._given(asked)
    with monkeypatch.context() as patch:  # as probes run: what a test gives is not what this process has
        patch.setattr("os.environ", {"TORCH_COMPILE_DISABLE": "1"})
        assert warm._given(asked)["TORCH_COMPILE_DISABLE"] == "1"


def test_a_server_outlives_the_folder_in_which_a_test_has_its_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "_servers", {})
    asked = dict(modules=("json",), arguments=["-c", "print(1)"], env=os.environ, cwd="/", timeout=60)
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        assert warm.run(**asked).stdout == "1\n"
    assert warm.run(**asked).stdout == "1\n"
