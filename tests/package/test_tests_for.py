"""`make test-for` knows tests for every patch."""

import subprocess
import sys

import pytest
import tests_for
from tree import TREE

from flashpatch import registry

FIRST_TO_LAST = (
    "patches/grpo/routing/test_resubmit",
    "verify/probes/test_grpo",
    "patches/test_undo",
    "docs/test_names",
)


@pytest.mark.parametrize("id", registry.patches())
def test_each_patch_has_tests_that_exist(id):
    environment, (_, marks, _, _, *paths) = tests_for.tests_for(registry.patches()[id])
    assert paths and all((TREE / path).exists() for path in paths)
    assert environment in (
        ("-sglang", "-sglang-0.5.12") if "sglang" in marks.partition(" or ")[0] else ("-0.24", "")
    )


def test_a_patch_of_verl_needs_the_environment_of_its_pins_and_its_own_tests_come_first():
    environment, arguments = tests_for.tests_for(registry.patches()["grpo.verl.generate"])
    assert environment == "-0.24" and arguments[3] == "not left_behind or grpo"
    at = [arguments.index(f"tests/{name}.py") for name in FIRST_TO_LAST]
    assert at == sorted(at)


def test_an_unknown_id_is_named(capsys):
    assert tests_for.main(["grpo.verl.generat"]) == 2
    assert "Did you mean 'grpo.verl.generate'?" in capsys.readouterr().err


def test_make_ends_with_an_error_at_an_unknown_id(tmp_path):
    python = tmp_path / "venv-0.24" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = [f"--old-file={tmp_path}/venv-0.24/.ready", f"VENV={tmp_path}/venv"]
    command = ["make", "-C", TREE, *made, "test-for", "PATCH=grpo.verl.generat"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean 'grpo.verl.generate'?" in done.stderr
