"""Run whole jobs of verl on a CUDA device; note what they said, and what their engines held.

    python -m cuda_lab.jobs update FOLDER OUT JOB...
    python -m cuda_lab.jobs step FOLDER OUT NAME...

A job is a recipe of `examples/gpu` with a tiny model, two steps of it; `flash_attn` is the stand-in of `fake_cuda/packages`.
`step` runs GRPO with 7B shapes and random weights, four steps; a name is of `cuda_lab.sizes.JOBS`."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_job
import torch
import verl_job
from random_models import configure
from safetensors.torch import save_file

from cuda_lab import device, results
from cuda_lab.sizes import HERE, JOBS, MIB

MAKE = verl_job.EXAMPLE / "make.py"
OPENED = {"gsm8k_fp8": "fp8", "flowrl_7b": "bf16", "eagle_7b": "bf16"}
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
trainer.total_training_steps=4
""".split()
TIMES = ("gen", "update_weights", "update_actor", "step")
EAGLE = """
[eagle]
drafter = "new"
arms = ["disable", "1_1_2", "3_1_4"]
train_seconds = 5.0
"""


def main(mode: str, root: str, out: str, *names: str) -> None:
    world = Path(root) / "world"
    subprocess.run([sys.executable, MAKE, world, "--hidden", "256"], check=True, cwd=MAKE.parent)
    for name in names:
        try:
            found = (step if mode == "step" else run)(name, world, Path(out).with_name(name))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        results.add(out, name, found)


def run(name: str, world: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    overrides, variables = cuda_job.recipe(name, world, folder)
    variables = {**variables, "LAB_SERVED": str(folder / "served")}
    saving = cuda_job.saving(folder)
    done = cuda_job.train(world, folder, *saving, like=overrides, fake=device.IS_FAKE, **variables)
    print(done.stdout, flush=True)
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    opened = f"{OPENED[name]}@{{}}:{'graphs' if device.IS_FAKE else 'defaults'}"
    wrong, changed = cuda_job.compared(world / "model", folder, opened, 90 if device.IS_FAKE else 0)
    return {
        "wrong": wrong,
        "changed": changed,
        "away": verl_job.metrics(done.stdout, "training/rollout_probs_diff_max"),
        "seconds": verl_job.metrics(done.stdout, "perf/time_per_step"),
        "live": len(verl_job.live(folder)),
    }


def step(name: str, world: Path, folder: Path) -> dict[str, Any]:
    """Say by what takes them the seconds of each step."""
    folder.mkdir()
    model, (prompts, responses, length) = world / "shapes", HERE.step
    if not model.exists():
        draw(world / "model", model)
    rollout = "actor_rollout_ref.rollout"
    sizes = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"]
    sizes += [f"{rollout}.n={responses}", f"data.max_response_length={length}"]
    sizes += [f"{rollout}.max_model_len={length + 64}", f"{rollout}.max_num_seqs={prompts * responses}"]
    sizes += [
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes={max(HERE.buckets['512 MiB'] // MIB, 1)}"
    ]
    sizes += [f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={HERE.cache // 2}"]
    sizes += [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.optim.lr=1e-6"]
    options = EAGLE if "eagle" in name else ""
    more = dict(fake=device.IS_FAKE, config=options, FLASHPATCH=JOBS[name])
    done = cuda_job.train(world, folder, *sizes, like=SETTINGS, **more)
    print(done.stdout, flush=True)
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    times = {part: verl_job.metrics(done.stdout, f"timing_s/{part}") for part in TIMES}
    parts = (f"{part} {', '.join(f'{one:.2f}' for one in some)} s" for part, some in times.items())
    return {"said": "; ".join(parts)}


def draw(words: Path, folder: Path) -> None:
    """Write a checkpoint of 7B shapes with random weights, drawn on the device, and the tokenizer of another model."""
    configure(HERE.dense, folder)
    for file in words.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(words / "chat_template.jinja", folder)
    tensors = {}
    for path, shape in HERE.dense.shapes():
        tensor = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        tensors[path] = (tensor.fill_(1) if "norm" in path else tensor.normal_(0, 0.02)).cpu()
    torch.cuda.empty_cache()  # for the job
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
