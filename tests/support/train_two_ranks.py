"""One rank of the sharded training that test_trainer.py compares with training alone."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from drafter_lab import capture, cut, make_target
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flashpatch.patches.eagle.train import checkpoint
from flashpatch.patches.eagle.train.checkpoint import Checkpoints
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.pack import pack
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
ttt_steps = int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
target = make_target()
parts = cut(capture(target, 6))
rows = [pack(parts[:1], 60), pack(parts[1:], 60)]  # unequal shares


def make():
    target_embeddings = TargetEmbeddings(target.model.embed_tokens.weight, target.lm_head.weight)
    recipe = Recipe(rate=1e-2, clip=0.1, ttt_steps=ttt_steps)
    return Trainer(make_drafter(drafter_config(target.config)), target_embeddings, recipe, mesh)


trainer = make()
found = trainer.backward(rows[rank])
gradients = {name: p.grad.full_tensor() for name, p in trainer.drafter.named_parameters()}
assert all(isinstance(p, DTensor) for p in trainer.drafter.parameters())
saved = Checkpoints(folder / "sharded")
replace = os.replace
checkpoint.os.replace = lambda *paths: (time.sleep(1.0), replace(*paths))  # a leader with a slow disk
steps = [trainer.step(rows[rank])]
saved.save(trainer)
steps.append(trainer.step(rows[rank] if rank == 0 else []))  # a rank without data
saved.settle()
assert saved.failed == 0, saved.problem
other = make()
assert saved.resume(other) and other.count == 1
assert other.step(rows[rank] if rank == 0 else []) == steps[1]
weights = trainer.weights()
if rank == 0:
    torch.save(
        {"found": found, "gradients": gradients, "steps": steps, "weights": weights}, folder / "out.pt"
    )
dist.barrier()
dist.destroy_process_group()
