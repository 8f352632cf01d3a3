"""What compares a probe's proofs with its source finds one that was not given."""

import probe_proofs
import pytest

from flashpatch.verify.probes.cpu import probe as cpu
from flashpatch.verify.probes.flowrl import probe as flowrl
from flashpatch.verify.probes.grpo import probe as grpo


@pytest.mark.parametrize("module", [cpu, flowrl, grpo], ids=["cpu", "flowrl", "grpo"])
def test_a_proof_that_is_missing_is_found(module):
    given = [
        {"what": one.pattern.replace("\\", "").replace(".+", "fsdp2").removeprefix("(?:").partition("|")[0]}
        for one in probe_proofs.patterns(module)
    ]
    assert len(given) >= 3
    assert not probe_proofs.missing(module, given)
    whole = [one for one in given if one["what"] != "fsdp2"]
    assert probe_proofs.missing(module, whole[1:])
