"""Whole jobs of verl as a GPU would run them: full graphs, sleep, FSDP2 offloaded, CUDA IPC, no padding, on the fake device."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("verl")

import cuda_job
import verl_job
import warm
from cuda_lab import results, runs
from cuda_lab.compare import differing
from gpu_recipes import GPU, recorded

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not runs.is_built(), reason="the fake CUDA device is not built here"),
]

#: Largest difference between a token's probabilities in rollout and actor, which computes in float32.
BOUND = {"bf16": 0.02, "fp8": 0.05}
#: What a tiny model and two cores need of a recipe, and two steps of it.
TINY = """
data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
actor_rollout_ref.ref.ulysses_sequence_parallel_size=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=32
actor_rollout_ref.rollout.max_num_batched_tokens=512 actor_rollout_ref.rollout.gpu_memory_utilization=0.3
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.rollout.enforce_eager=False
trainer.val_before_train=False trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_training_steps=2
""".split()
FLOWRL = """
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.optim.lr_warmup_steps=0
""".split()
RECIPES = {
    "gsm8k_fp8": ["critic.ppo_mini_batch_size=8", "critic.optim.lr=1e-3"],
    "flowrl_7b": FLOWRL,
    "eagle_7b": ["data.max_response_length=24", "actor_rollout_ref.actor.optim.lr=1e-4"],
}
SAVED = ["trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"]
# How large the cache is, and of rotary embeddings a package that jobs alone have.
OTHERWISE = (".kv_cache", ".apply_rotary_emb_flash_attn")
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
        options=EAGLE + "\n[grpo]\nlogprobs = true\n",
        FLASHPATCH="eagle,fp8,grpo,fsdp",
    )
    agrees(output, BOUND["fp8"])
    (arrived,) = (note for note in verl_job.audits(tmp_path) if "audited" in note)
    assert (arrived["sync"], arrived["audited"], arrived["failed"], arrived["not_audited"]) == (3, 3, 0, 0)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_gpus(name, wide_world, tmp_path, run):
    from flashpatch.patches.eagle.verl import verl_config

    given = {"MODEL": str(wide_world / "model"), "DATA": str(wide_world), "GPUS": "1"}
    if name == "eagle_7b":
        given["DRAFTER"] = str(tmp_path / "drafter")
        options = {"drafter": "new", "trainer": ()}
        verl_config._write_new(wide_world / "model", tmp_path / "drafter", options, "vllm")
    recipe = recorded(GPU / f"{name}.sh", tmp_path, **given)
    world = [
        f"data.{which}_files={wide_world}/{file}.parquet"
        for which, file in (("train", "train"), ("val", "test"))
    ]
    saved = [*SAVED, f"trainer.default_local_dir={tmp_path}/saved"]
    output = run(*TINY, *world, *saved, *RECIPES[name], like=list(recipe.overrides), **recipe.variables)
    agrees(output, BOUND["fp8" if "fp8" in name else "bf16"])
    if name == "flowrl_7b":
        assert len(verl_job.metrics(output, "actor/log_z")) == 2
    holds_what_was_trained(wide_world / "model", tmp_path, "fp8" if "fp8" in name else "bf16")


def holds_what_was_trained(first: Path, folder: Path, case: str) -> None:
    """After each sync the engine holds, byte for byte, what one does that opens the policy which the trainer saved."""
    trained = [folder / "saved" / f"global_step_{step}" / "actor" / "huggingface" for step in (1, 2)]
    policies = [f"{case}@{path}:graphs" for path in (first, *trained)]
    fresh = runs.run(folder, "engine", "fresh", 90, policies, warm.VLLM_CUDA)
    served = list(results.read(folder / "served").values())
    for policy, synced in zip(policies, served, strict=True):
        wrong = differing(fresh[policy]["workers"], [synced])
        assert all(path.endswith(OTHERWISE) for path in wrong), wrong
        assert synced["addresses"] == served[0]["addresses"]  # which the captured graphs read
    assert all(len(differing([one], [later])) > 10 for one, later in pairwise(served))
