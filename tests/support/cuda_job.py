"""Whole jobs of verl on the fake CUDA device or a GPU: nothing of them runs for the CPU's sake.

An actor under FSDP2 and vLLM share the device; vLLM captures full graphs, sleeps, and gets weights by CUDA IPC. flash-attn is
a stand-in in torch. Two cores need 2 to 4 minutes for a job of two steps."""

import os
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import verl_job
from cuda_lab import results, runs
from cuda_lab.compare import differing
from fake_cuda.variables import variables
from gpu_recipes import GPU, recorded
from installed import version_of
from packaging.version import Version

HERE = Path(__file__).parent / "fake_cuda"

#: What verl does without being told, and what its own recipes tell it.
LIKE_A_RECIPE = """
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.dtype=float32
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.gpu_memory_utilization=0.3
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512
""".split()

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

#: Without a compiler, and in little time: two cores do not hold the bundle that verl asks Ray for.
SMALL = """
actor_rollout_ref.actor.optim.lr=1e-3 ray_kwargs.ray_init.num_cpus=8
+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[1,2,4,8,16,32]}
""".split()
if version_of("vllm") >= Version("0.33"):  # its warm-up knows no Triton kernel that is interpreted
    SMALL.append("+actor_rollout_ref.rollout.engine_kwargs.vllm.kernel_config={enable_jit_warmup:False}")


def device(**more: str) -> dict[str, str]:
    """Return the variables of a process on the device, beside this process's own."""
    wanted = variables(runs.ENVIRONMENT, 90, FAKE_CUDA_MIB="2048", **more)
    wanted["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE / "packages")])
    wanted["PATH"] = os.pathsep.join([str(HERE / "bin"), str(runs.ENVIRONMENT / "bin"), os.environ["PATH"]])
    del wanted["VLLM_ENABLE_V1_MULTIPROCESSING"]  # verl's engine core is a process of its own
    return {name: value for name, value in wanted.items() if os.environ.get(name) != value}


def on_gpu() -> dict[str, str]:
    """Return the variables of a process on a GPU; flash-attn is the stand-in there too."""
    paths = [str(HERE.parent), str(HERE / "packages")]
    switches = {"TORCH_COMPILE_DISABLE": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {"PYTHONPATH": os.pathsep.join(paths), **switches}


def train(
    world: Path, folder: Path, *extra: str, like: list[str] = LIKE_A_RECIPE, fake: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of two steps to its end; later settings win. On a GPU vLLM compiles and captures as it does by default.

    It is in this process's group, with which it ends: killed alone, a lab would leave it on the card."""
    small, where = (SMALL, device(**more)) if fake else (SMALL[:2], {**on_gpu(), **more})
    return verl_job.train(world, folder, *like, *small, *extra, group=os.getpgrp(), **where)


def recipe(name: str, world: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return verl's settings and FlashPatch's variables of a recipe of `examples/gpu` with a tiny model."""
    from flashpatch.patches.eagle.verl import verl_config

    given = {"MODEL": str(world / "model"), "DATA": str(world), "GPUS": "1"}
    if name == "eagle_7b":
        given["DRAFTER"] = str(folder / "drafter")
        options = {"drafter": "new", "trainer": ()}
        verl_config._write_new(world / "model", folder / "drafter", options, "vllm")
    found = recorded(GPU / f"{name}.sh", folder, **given)
    data = [f"data.train_files={world}/train.parquet", f"data.val_files={world}/test.parquet"]
    return [*found.overrides, *TINY, *data, *RECIPES[name]], found.variables


def saving(folder: Path) -> list[str]:
    """Return settings that let the trainer save each policy."""
    return [*SAVED, f"trainer.default_local_dir={folder}/saved"]


def compared(first: Path, folder: Path, opened: str, capability: int, imported: Sequence[str] = ()):
    """Compare what the engine held after each sync with an engine that opens the policy which the trainer saved.

    Returns:
        The paths that differ, or have another address than after the first sync, which captured graphs read; and how many
        paths each sync changed."""
    trained = [folder / "saved" / f"global_step_{step}" / "actor" / "huggingface" for step in (1, 2)]
    policies = [opened.format(path) for path in (first, *trained)]
    fresh = runs.run(folder, "engine", "fresh", capability, policies, imported)
    served = list(results.read(folder / "served").values())
    wrong = [] if len(served) == len(policies) else [f"{len(served)} syncs"]
    for policy, synced in zip(policies, served, strict=False):
        found = differing(fresh[policy]["workers"], [synced])
        wrong += [f"{policy}: {path}" for path in found if not path.endswith(OTHERWISE)]
        moved = synced["addresses"] != served[0]["addresses"]
        wrong += [f"{policy}: another address"] if moved else []
    return wrong, [len(differing([one], [later])) for one, later in pairwise(served)]
