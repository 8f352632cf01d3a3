"""The family's own proof says yes here, and no where there is nothing to prove."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cpu_lab
import pytest
from machine import limit

pytestmark = pytest.mark.verl


def test_it_is_live_here(tmp_path):
    done = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "cpu", "--json"],
        env=cpu_lab.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    assert done.returncode == 0, cpu_lab.tail(done)
    (family,) = json.loads(done.stdout)["families"]
    assert all(proof["ok"] for proof in family["proofs"]) and len(family["proofs"]) == 5


def test_with_an_accelerator_nothing_is_proven(monkeypatch, tmp_path):
    from flashpatch.patches.cpu import accelerator
    from flashpatch.verify.probes import cpu

    monkeypatch.setattr(accelerator, "found", lambda: "cuda")
    (proof,) = cpu.probe("nonce", tmp_path)
    assert not proof.ok and "cuda" in proof.evidence
