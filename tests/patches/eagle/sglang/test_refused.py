"""Engines of SGLang before 0.5.17, for which the family has no adapter: refused by name, and nothing half applied."""

from pathlib import Path

import cpu_lab
import eagle_engines as eagles
import pytest
import warm

pytestmark = pytest.mark.sglang

lab = eagles.lab
OLD = lab.VERSION < (0, 5, 17)
only_old = pytest.mark.skipif(not OLD, reason="the family acts on newer versions")
SAID = f"sglang {'.'.join(map(str, lab.VERSION))} does not meet sglang>=0.5.17"

CONFIG = """
import flashpatch, pytest
flashpatch.enable({names}, "eagle")
from omegaconf import OmegaConf
from verl.utils.config import validate_config
rollout = dict(name="sglang", engine_kwargs=dict(sglang=dict(speculative_draft_model_path="drafter")))
job = dict(actor_rollout_ref=dict(rollout=rollout))
with pytest.raises(flashpatch.PatchError) as error:
    validate_config(OmegaConf.create(job), False, False)
print(error.value)
"""


@only_old
@pytest.mark.parametrize("families", ["eagle", pytest.param("bf16,eagle", marks=pytest.mark.full)])
def test_an_engine_does_not_open(families: str, models: Path, tmp_path: Path) -> None:
    job = dict(model=lab.checkpoint(models, "llama", 0), steps=["answers"])
    refused, without = lab.together(
        tmp_path,
        dict(job, flashpatch=families),
        dict(job, flashpatch=families.removesuffix("eagle").strip(",")),
    )
    assert not refused.done and not refused.steps, str(refused)
    assert "[flashpatch: eagle.sglang." in refused.log and SAID in refused.log
    assert "flashpatch doctor" in refused.log, "it does not say what to do"
    assert without.done, str(without)


@pytest.mark.verl
def test_a_job_of_verl_does_not_start(tmp_path: Path) -> None:
    """In an old SGLang, and in newer ones where a sync would reach the drafter too."""
    names = '"cpu", "bf16"' if OLD else '"cpu"'
    config = CONFIG.replace("{names}", names)
    done = cpu_lab.checked(config, tmp_path, imported=warm.VERL, SGLANG_USE_CPU_ENGINE="1")
    assert "rollout.name=sglang" in done.stdout and (SAID if OLD else "without bf16") in done.stdout
    assert "take eagle out of FLASHPATCH" in done.stdout
