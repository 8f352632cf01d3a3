"""Measure the steps of a whole job of verl: GRPO on one card, with random weights of a 7B's shapes and a tiny tokenizer."""

import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_job
import torch
import verl_job
from cuda_lab import device
from random_models import FILE, configure
from safetensors.torch import save_file

from card.table import BUCKETS, CACHE, DENSE, JOBS, LENGTH, PROMPTS, RESPONSES

# All of the actor in bf16: 61 GB with Adam's, beside an engine on the same card, nothing offloaded.
SETTINGS = """
algorithm.adv_estimator=grpo data.max_prompt_length=32 data.dataloader_num_workers=0
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.dtype=bfloat16
actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.gpu_memory_utilization=0.3
actor_rollout_ref.rollout.ignore_eos=True actor_rollout_ref.rollout.max_num_batched_tokens=8192
actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_training_steps=4
""".split()
PARTS = ("gen", "update_weights", "update_actor", "step")
EAGLE = '[eagle]\ndrafter = "new"\narms = ["disable", "1_1_2", "3_1_4"]\ntrain_seconds = 5.0\n'


def measured(row: str, root: Path, _ours: bool) -> dict[str, Any]:
    """Return what takes its seconds in a step, by the median of all steps but the first, which compiles."""
    world, folder, rollout = root / "world", root / f"job-{row}", "actor_rollout_ref.rollout"
    model = world / "shapes"
    if not model.exists():
        make = verl_job.EXAMPLE / "make.py"
        subprocess.run([sys.executable, make, world, "--hidden", "256"], check=True, cwd=make.parent)
        draw(world / "model", model)
    megabytes = max(BUCKETS["512 MiB"] >> 20, 1)
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={LENGTH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"{rollout}.n={RESPONSES}",
        f"{rollout}.max_model_len={LENGTH + 64}",
        f"{rollout}.max_num_seqs={PROMPTS * RESPONSES}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes={megabytes}",
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={CACHE // 2}",
    ]
    folder.mkdir()
    options = EAGLE if "eagle" in row else ""
    more = dict(fake=device.IS_FAKE, config=options, FLASHPATCH=JOBS[row])
    done = cuda_job.train(world, folder, *settings, like=SETTINGS, **more)
    print(done.stdout, flush=True)
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    times = {part: verl_job.metrics(done.stdout, f"timing_s/{part}") for part in PARTS}
    return {part: {"s": statistics.median(some[1:])} for part, some in times.items()}


def draw(words: Path, folder: Path) -> None:
    """Write a checkpoint with random weights, drawn on the device, and the tokenizer of another model."""
    configure(DENSE, folder)
    for file in (*words.glob("*token*"), words / "chat_template.jinja"):
        shutil.copy(file, folder)
    tensors = {}
    for path, shape in DENSE.shapes():
        tensor = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        tensors[path] = (tensor.fill_(1) if "norm" in path else tensor.normal_(0, 0.02)).cpu()
    torch.cuda.empty_cache()  # for the job
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
