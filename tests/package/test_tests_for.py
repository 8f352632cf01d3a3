"""`make test-for` knows tests for every patch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tests_for
from tree import TREE

from flashpatch import registry


@pytest.mark.parametrize("id", registry.patches())
def test_each_patch_has_tests_that_exist(id):
    lines = tests_for.tests_for(registry.patches()[id])
    for arguments in lines.values():
        paths = [one.partition("::")[0] for one in arguments if one.startswith("tests/")]
        assert paths and all((TREE / path).exists() for path in paths)
    assert len(lines) == 2 or id.split(".")[1] in ("trl", "swift", "prime_rl")


def test_what_names_a_patch_belongs_to_it():
    _, arguments = tests_for.tests_for(registry.patches()["grpo.verl.generate"]).values()
    assert "tests/patches/grpo/routing/test_resubmit.py" in arguments
    assert "tests/patches/test_undo.py" in arguments and arguments[-1] == "not left_behind or grpo"
    assert "tests/verify/probes/test_grpo.py" in arguments


def test_an_unknown_id_is_named(capsys):
    assert tests_for.main(["grpo.verl.generat"]) == 2
    assert "Did you mean 'grpo.verl.generate'?" in capsys.readouterr().err


def test_make_ends_with_an_error_at_an_unknown_id(tmp_path):
    python = tmp_path / "venv-check" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = [f"--old-file={tmp_path}/venv-check/.ready", f"VENV={tmp_path}/venv"]
    command = ["make", "-C", TREE, *made, "test-for", "PATCH=grpo.verl.generat"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean 'grpo.verl.generate'?" in done.stderr
    assert not (TREE / ".tests-for").exists()
