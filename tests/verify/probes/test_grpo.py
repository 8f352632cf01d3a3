"""The family's own proof says yes here, and no when it is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpo_lab
import grpo_probe
import probe_proofs
import pytest
from machine import limit
from tree import SUPPORT

from flashpatch.verify.probes.grpo import verl_probe

pytestmark = pytest.mark.verl


def verify(folder: Path, **extra: str) -> tuple[int, dict]:
    done = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "grpo", "--json"],
        env=grpo_lab.environment(folder, TMPDIR=str(folder), **extra),
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    assert done.stdout.startswith("{"), grpo_lab.tail(done)
    (family,) = json.loads(done.stdout)["families"]
    return done.returncode, family


def test_it_is_live_here():
    said = grpo_probe.said()
    assert said.code == 0 and all(proof["ok"] for proof in said.family["proofs"]), said.family
    assert not probe_proofs.missing(verl_probe, said.family["proofs"])


@pytest.mark.full
@pytest.mark.parametrize("sabotage", ["stale_binding", "no_resubmission"])
def test_sabotage_is_caught(tmp_path, sabotage):
    path = str(SUPPORT / "grpo_sabotage")
    code, family = verify(tmp_path, PYTHONPATH=path, SABOTAGE=sabotage)
    failed = [proof["evidence"] for proof in family["proofs"] if not proof["ok"]]
    assert code == 1 and failed
    if sabotage == "stale_binding":
        assert "grpo.verl.prepare_micro_batches must be live" in " ".join(failed)
