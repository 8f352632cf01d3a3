"""Whole jobs of verl on the fake CUDA device, as on a machine with a GPU: nothing of them runs for the CPU's sake.

An actor under FSDP2 and vLLM share the device; vLLM captures full graphs, sleeps, and gets weights by CUDA IPC. flash-attn is
a stand-in in torch. Two cores need 2 to 4 minutes for a job of two steps.
"""

import os
import subprocess
from pathlib import Path

import verl_job
from cuda_lab.runs import ENVIRONMENT
from fake_cuda.variables import variables

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

#: Without a compiler, and in little time: two cores do not hold the bundle that verl asks Ray for.
SMALL = """
actor_rollout_ref.actor.optim.lr=1e-3 ray_kwargs.ray_init.num_cpus=8
+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[1,2,4,8,16,32]}
""".split()


def device(**more: str) -> dict[str, str]:
    """Return the variables of a process on the device, beside this process's own."""
    wanted = variables(ENVIRONMENT, 90, FAKE_CUDA_MIB="2048", **more)
    wanted["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE / "packages")])
    wanted["PATH"] = os.pathsep.join([str(HERE / "bin"), str(ENVIRONMENT / "bin"), os.environ["PATH"]])
    del wanted["VLLM_ENABLE_V1_MULTIPROCESSING"]  # verl's engine core is a process of its own
    return {name: value for name, value in wanted.items() if os.environ.get(name) != value}


def train(
    world: Path, folder: Path, *extra: str, like: list[str] = LIKE_A_RECIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of two steps to its end; later settings win."""
    return verl_job.train(world, folder, *like, *SMALL, *extra, **device(**more))
