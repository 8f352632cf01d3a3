"""Whole jobs of verl as a GPU would run them: full graphs, sleep, FSDP2 offloaded, CUDA IPC, no padding, on the fake device."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl")

import cuda_job
import verl_job
import warm
from cuda_lab import results
from cuda_lab.lane import NEEDS_DEVICE

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]

#: Largest difference between a token's probabilities in rollout and actor, which computes in float32.
BOUND = {"bf16": 0.02, "fp8": 0.05}


@pytest.fixture
def run(wide_world: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a job of two steps; return what it printed, once `--live` has found each of its patches proven."""

    def run(*extra: str, options: str = "", **more: str) -> str:
        served = tmp_path / "served"
        done = cuda_job.train(wide_world, tmp_path, *extra, config=options, LAB_SERVED=str(served), **more)
        assert done.returncode == 0, done.stdout[-8000:]
        verl_job.live(tmp_path)
        syncs = list(results.read(served).values())
        assert [synced["launches"] for synced in syncs] == [0, 0, 0]
        if (
            "eagle" not in more["FLASHPATCH"]
        ):  # on vLLM 0.24 drafts run on the first runner, without full graphs
            assert syncs[0]["graphs"] < syncs[1]["graphs"] < syncs[2]["graphs"]
        return done.stdout

    return run


def agrees(output: str, bound: float) -> None:
    """Its tokens have the actor's probabilities in both steps."""
    differences = verl_job.metrics(output, "training/rollout_probs_diff_max")
    assert len(differences) == 2 and max(differences) < bound, differences


def test_every_sync_audited_with_a_drafter_and_the_log_probabilities_of_grpo(run, tmp_path):
    """Stock verl's fused ones meet a head that FSDP2 has sharded: "mixed torch.Tensor and DTensor"."""
    output = run(
        "actor_rollout_ref.model.use_fused_kernels=True",
        "data.max_response_length=24",
        options=cuda_job.EAGLE + "\n[grpo]\nlogprobs = true\n",
        FLASHPATCH="eagle,fp8,grpo,fsdp",
    )
    agrees(output, BOUND["fp8"])
    (arrived,) = (note for note in verl_job.audits(tmp_path) if "audited" in note)
    assert (arrived["sync"], arrived["audited"], arrived["failed"], arrived["not_audited"]) == (3, 3, 0, 0)


# the drafter of the last is trained and replaced as above, beside a policy in bf16
@pytest.mark.parametrize("name", ["gsm8k_fp8", "flowrl_7b", pytest.param("eagle_7b", marks=pytest.mark.full)])
def test_a_recipe_for_gpus(name, wide_world, tmp_path, run):
    overrides, variables = cuda_job.recipe(name, wide_world, tmp_path)
    output = run(*cuda_job.saving(tmp_path), like=overrides, **variables)
    agrees(output, BOUND["fp8" if "fp8" in name else "bf16"])
    if name == "flowrl_7b":
        assert len(verl_job.metrics(output, "actor/log_z")) == 2
    case = "fp8" if "fp8" in name else "bf16"
    wrong, changed = cuda_job.compared(
        wide_world / "model", tmp_path, f"{case}@{{}}:graphs", 90, warm.VLLM_CUDA
    )
    assert not wrong and all(count > 10 for count in changed)
