"""Whole jobs of verl as a GPU would run them: full graphs, sleep, FSDP2 offloaded, CUDA IPC, no padding, on the fake device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl")

import cuda_job
import verl_job
from cuda_lab import runs
from gpu_recipes import GPU, recorded

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not runs.is_built(), reason="the fake CUDA device is not built here"),
]

#: Largest difference between a token's probabilities in rollout and actor, which computes in float32.
BOUND = {"bf16": 0.02, "fp8": 0.05}
EAGLE = """
[eagle]
drafter = "new"
train_seconds = 5.0
trainer = ["rate=3e-3", "least=4", "batch=64", "dtype=float32"]
"""


@pytest.fixture
def run(wide_world: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a job of two steps; return what it printed, once `--live` has found each of its patches proven."""

    def run(*extra: str, options: str = "", **more: str) -> str:
        if options:
            (tmp_path / "flashpatch.toml").write_text(options)
            more["FLASHPATCH_CONFIG"] = str(tmp_path / "flashpatch.toml")
        done = cuda_job.train(wide_world, tmp_path, *extra, **more)
        assert done.returncode == 0, done.stdout[-8000:]
        verl_job.live(tmp_path)
        return done.stdout

    return run


def agrees(output: str, bound: float) -> None:
    """In both steps the engine gave its tokens the probabilities that the actor gives them."""
    differences = verl_job.metrics(output, "training/rollout_probs_diff_max")
    assert len(differences) == 2 and max(differences) < bound, differences


def test_what_a_gpu_chooses_for_fp8(run):
    agrees(run(FLASHPATCH="fp8"), BOUND["fp8"])


def test_every_sync_audited_with_the_loss_of_grpo(run, tmp_path):
    agrees(
        run("actor_rollout_ref.model.use_fused_kernels=True", FLASHPATCH="fp8,grpo,fsdp"),
        BOUND["fp8"],
    )
    (arrived,) = (note for note in verl_job.audits(tmp_path) if "audited" in note)
    assert (arrived["sync"], arrived["audited"], arrived["failed"], arrived["not_audited"]) == (3, 3, 0, 0)


def test_a_drafter_beside_fp8(run):
    output = run(
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.max_model_len=64",
        options=EAGLE,
        FLASHPATCH="eagle,fp8",
    )
    agrees(output, BOUND["fp8"])


def test_flowrl(run):
    output = run(FLASHPATCH="bf16,flowrl")
    agrees(output, BOUND["bf16"])
    assert len(verl_job.metrics(output, "actor/log_z")) == 2
