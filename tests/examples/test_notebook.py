"""The notebook of the first update, cell by cell as a reader runs it."""

import json
import os
import sys

import machine
import pytest
from tree import TREE

NOTEBOOK = TREE / "examples" / "first_update.ipynb"


@pytest.mark.vllm
def test_the_notebook_ends_exact_and_proven(tmp_path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join(code))
    env = {**os.environ, "FLASHPATCH_LEDGER": str(tmp_path / "ledger"), "OMP_NUM_THREADS": "1"}
    done = machine.run([sys.executable, script], 300, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the trainer is gone\n[flashpatch: fp8.vllm.engine_core_step] rank 0 cannot serve" in done.stdout
    assert "\nexact\n" in done.stdout and " proven" in done.stdout.rpartition("verdict")[2]


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
