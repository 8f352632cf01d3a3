"""The family's own proof says yes here, and no where there is nothing to prove."""

import cpu_lab
import probe_proofs
import pytest
from verify_command import here, verify

from flashpatch.verify.probes.cpu import probe

pytestmark = pytest.mark.verl


def test_it_is_live_here(tmp_path):
    said, _ = here("cpu", tmp_path, cpu_lab.environment(tmp_path))
    assert not probe_proofs.missing(probe, said.proven().proofs)


def test_with_an_accelerator_nothing_is_proven(monkeypatch, tmp_path):
    from flashpatch.patches.cpu import platform

    monkeypatch.setattr(platform, "accelerator", lambda: "cuda")
    (proof,) = probe.probe("nonce", tmp_path)
    assert not proof.ok and "cuda" in proof.evidence


@pytest.mark.sglang
@pytest.mark.full
def test_on_two_real_ranks_beside_sglang(tmp_path):
    import sglang_lab

    said = verify("cpu", tmp_path, sglang_lab.environment(tmp_path)).proven()
    assert "sglang 0." in said.proofs[0]["evidence"]
