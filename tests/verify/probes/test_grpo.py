"""The family's own proof says yes here, and no when it is broken."""

import json

import grpo_lab
import probe_proofs
import pytest
import warm_ranks
from tree import SUPPORT
from verify_command import verify

from flashpatch.verify import cli
from flashpatch.verify.probes.grpo import probe

pytestmark = pytest.mark.verl


def test_it_is_live_here(tmp_path, capsys):
    """The command runs in this process; its ranks fork from a warm interpreter."""
    with warm_ranks.used() as patch:
        patch.setattr("os.environ", grpo_lab.environment(tmp_path))
        code = cli.main(["grpo", "--json"])
    (family,) = json.loads(capsys.readouterr().out)["families"]
    assert code == 0 and all(proof["ok"] for proof in family["proofs"]), family
    assert not probe_proofs.missing(probe, family["proofs"])


@pytest.mark.full
@pytest.mark.parametrize("sabotage", ["stale_binding", "no_resubmission"])
def test_sabotage_is_caught(tmp_path, sabotage):
    path = str(SUPPORT / "grpo_sabotage")
    said = verify("grpo", tmp_path, grpo_lab.environment(tmp_path), 600, PYTHONPATH=path, SABOTAGE=sabotage)
    failed = [proof["evidence"] for proof in said.proofs if not proof["ok"]]
    assert said.code == 1 and failed
    if sabotage == "stale_binding":
        assert "grpo.verl.prepare_micro_batches must be live" in " ".join(failed)
