"""The family's own proof says yes here, and no under sabotage."""

from pathlib import Path

import flow_lab
import probe_proofs
import pytest
import verify_command

from flashpatch.verify.probes.flowrl import probe

pytestmark = pytest.mark.verl


def verify(folder: Path, **extra: str) -> verify_command.Said:
    return verify_command.verify("flowrl", folder, flow_lab.environment(folder), flow_lab.LIMIT, **extra)


def doctored(folder: Path, file: str, text: str, other: str) -> verify_command.Said:
    """What is said of FlashPatch in which one text of one file of the family is another."""
    site = verify_command.doctored(folder, f"flowrl/{file}", text, other)
    said = verify(folder, PYTHONPATH=site)
    assert said.code == 1, said.text
    return said


@pytest.mark.full
def test_it_is_live_here(tmp_path):
    said = verify(tmp_path).proven()
    assert not probe_proofs.missing(probe, said.proofs)


@pytest.mark.full
def test_it_is_live_with_other_options(tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('[flowrl]\nlog_z = "group"\nreward = "raw"\nbeta = 2.0\nlength = "sum"\n')
    said = verify(tmp_path, FLASHPATCH_CONFIG=str(config)).proven()
    (unsaid,) = probe_proofs.missing(probe, said.proofs)
    assert unsaid.startswith("log")  # there is no partition function


@pytest.mark.full
def test_a_loss_that_forgets_the_reference_is_caught_though_every_patch_is_live(tmp_path):
    said = doctored(tmp_path, "objective.py", " - over(ref_log_prob)", "")
    assert said.failed == {"the loss is the paper's, computed in float64 without verl"}


@pytest.mark.full
@pytest.mark.parametrize(
    "file, text, other, what",
    [
        ("partition_function.py", "if self.sharers is not None:", "if False:", "two ranks that share"),
        (
            "partition_function.py",
            "means.detach() if self._detach else means",
            "(means * 0).detach()",
            "log Z is that",
        ),
        ("actor.py", "if head is None:\n        return", "if True:\n        return", "LoRA adapters learn"),
        ("loss.py", 'chosen.reward == "raw":', 'chosen.reward != "raw":', "the driver's advantages"),
    ],
)
def test_other_sabotage_is_caught(tmp_path, file, text, other, what):
    said = doctored(tmp_path, file, text, other)
    assert any(proof.startswith(what) for proof in said.failed), said.text
