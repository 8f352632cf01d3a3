"""The family's own proof says yes here, and no when it is broken."""

import grpo_lab
import probe_proofs
import pytest
import verify_command
from tree import SUPPORT

from flashpatch.verify.probes.grpo import probe

pytestmark = pytest.mark.verl


def test_it_is_live_here(tmp_path):
    said, _ = verify_command.here("grpo", tmp_path, grpo_lab.environment(tmp_path))
    assert not probe_proofs.missing(probe, said.proven().proofs)


@pytest.mark.full
@pytest.mark.parametrize("sabotage", ["stale_binding", "no_resubmission"])
def test_sabotage_is_caught(tmp_path, sabotage):
    path = str(SUPPORT / "grpo_sabotage")
    said = verify_command.verify(
        "grpo", tmp_path, grpo_lab.environment(tmp_path), 600, PYTHONPATH=path, SABOTAGE=sabotage
    )
    failed = [proof["evidence"] for proof in said.proofs if not proof["ok"]]
    assert said.code == 1 and failed
    if sabotage == "stale_binding":
        assert "grpo.verl.prepare_micro_batches must be live" in " ".join(failed)
