"""The family's own proof says yes here; where it is broken, no: see `test_mutants`."""

import grpo_lab
import probe_proofs
import pytest
import verify_command

from flashpatch.verify.probes.grpo import probe

pytestmark = pytest.mark.verl


def test_it_is_live_here(tmp_path):
    said, _ = verify_command.here("grpo", tmp_path, grpo_lab.environment(tmp_path))
    assert not probe_proofs.missing(probe, said.proven().proofs)
