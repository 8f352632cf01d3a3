"""``flashpatch-verify fsdp`` on the installed verl, and when one of its patches does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_lab
import pytest
from machine import limit

from flashpatch.verify.probes.fsdp import verl_probe

pytestmark = pytest.mark.verl

SABOTAGE = """
import sys
if "FLASHPATCH" in __import__("os").environ:
    import flashpatch.patches._shared.fingerprint as fingerprint
    fingerprint.of = lambda *args, **kwargs: (0, 0)  # which add up to what they are, over any ranks
"""


def verify(folder: Path, **extra: str) -> tuple[int, dict]:
    done = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "fsdp", "--json"],
        env=cpu_lab.environment(folder, **extra),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit(900),
    )
    return done.returncode, json.loads(done.stdout)


def test_an_update_that_was_refused_is_said_with_its_reason(tmp_path):
    """It left no weights to compare, which ended the probe with a KeyError."""
    torch = pytest.importorskip("torch")
    refused = {"error": "PatchError: weights arrive without fingerprints", "committed": False}
    for rank in range(2):
        (tmp_path / f"rollout-{rank}.json").write_text(json.dumps([refused] * len(verl_probe.PLAN)))
        for number in range(len(verl_probe.PLAN)):
            torch.save({}, tmp_path / f"rollout-{rank}-{number}.pt")
    proofs = verl_probe._weigh(tmp_path, {"model.norm.weight": torch.ones(2)}, 1.0)
    assert not any(proof.ok for proof in proofs)
    assert "without fingerprints" in proofs[0].evidence


@pytest.mark.full
def test_the_probe_proves_the_family(tmp_path):
    code, said = verify(tmp_path)
    assert code == 0, said


@pytest.mark.full
def test_a_fingerprint_that_always_agrees_is_found_out(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    code, said = verify(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path)]))
    assert code == 1
    assert "it was loaded" in json.dumps(said)
