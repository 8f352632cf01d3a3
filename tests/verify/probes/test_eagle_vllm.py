"""The family's own proof says yes on a real engine, and no under sabotage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit

pytest.importorskip("torch")


import flashpatch
import flashpatch.patches
import flashpatch.verify

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = [pytest.mark.vllm, pytest.mark.full]


def _verify(folder: Path, **variables: str) -> tuple[int, list[dict], str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "eagle", "--json"],
        env={**inherited, "TMPDIR": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    said = done.stdout + done.stderr
    try:
        [family] = json.loads(done.stdout)["families"]
    except ValueError:
        pytest.fail(said)
    return done.returncode, family["proofs"], said


def test_a_live_engine_is_proven(tmp_path):
    code, proofs, said = _verify(tmp_path)
    assert code == 0, said
    assert all(proof["ok"] for proof in proofs) and len(proofs) >= 6


@pytest.mark.parametrize(
    ("file", "text", "other", "what"),
    [
        (
            "capture.py",
            "            self.positions,\n",
            "            self.positions + 1,\n",
            "captured states",
        ),
        (
            "spec_controller.py",
            "self._arms[min(arm.steps, self.max_drafts)]",
            "self._arms[self.max_drafts]",
            "the bandit",
        ),
        (
            "drafter_refit.py",
            "        drafter.load_weights(iter(tensors.items()))\n",
            "",
            "new drafter weights",
        ),
    ],
)
def test_sabotage_is_caught(tmp_path, file, text, other, what):
    site = tmp_path / "site"
    for package in (flashpatch, flashpatch.patches, flashpatch.verify):
        source, copy = Path(package.__file__).parent, site.joinpath(*package.__name__.split("."))
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = site / "flashpatch" / "patches" / "eagle" / "vllm" / file
    assert path.read_text().count(text) == 1, f"{file} has changed: write this sabotage anew"
    path.write_text(path.read_text().replace(text, other))
    code, proofs, said = _verify(tmp_path, PYTHONPATH=str(site))
    assert code == 1, said
    assert any(proof["what"].startswith(what) and not proof["ok"] for proof in proofs), said
