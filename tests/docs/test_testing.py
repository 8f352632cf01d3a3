"""A file that needs a library is skipped without it, as `docs/develop/testing.md` says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tree import SUPPORT

IMPORTED = {"torch": "skipped", "helper": "skipped", "flashpatch_own": "error", "unheard_of": "error"}


@pytest.mark.parametrize(("imported", "end"), IMPORTED.items())
def test_a_file_is_skipped_without_torch_unless_flashpatch_wants_it(tmp_path: Path, imported, end) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    for name in ("helper", "flashpatch_own"):
        (tmp_path / f"{name}.py").write_text("import torch")
    (tmp_path / "test_it.py").write_text(f"import {imported}\ndef test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "marked_files", "-q", "-c", os.devnull, "test_it.py"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SUPPORT}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert f"1 {end} in " in done.stdout, done.stdout
