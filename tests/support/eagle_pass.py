"""One rank of verl's actor worker whose passes a drafter learns from: ``python eagle_pass.py DIR CASES``, CASES a JSON file in DIR.

Writes ``NAME-RANK.pt``: what a trainer reads of three passes, the last by a policy trained once, and what `flow_lab.stepped` returns."""

import json
import os
import sys
from pathlib import Path

import flow_lab
import torch
import torch.distributed as dist
from omegaconf import open_dict

import flashpatch

flashpatch.enable("eagle")

from flashpatch.patches.eagle.capture.sample_queue import SampleReader
from flashpatch.patches.eagle.verl import old_log_probs
from flashpatch.verify.probes.flowrl import tiny

folder, cases = Path(sys.argv[1]), json.loads((Path(sys.argv[1]) / sys.argv[2]).read_text())
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = [
    f"{flow_lab.ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
]
COMMON = [f"trainer.n_gpus_per_node={ranks}", *(f"{size}={8 // ranks}" for size in SIZES)]
for case in cases:
    config = tiny.recipe(folder / case["model"], *COMMON, *case["settings"])
    queue = folder / f"queue-{case['name']}-{rank}"
    if case["captures"]:
        told = {"settings": {"queue": str(queue), "kind": "eagle3"}}
        with open_dict(config):
            config.actor_rollout_ref.rollout.engine_kwargs.flashpatch = {"eagle": json.dumps(told)}
    worker, mine = tiny.worker(config), tiny.responses()[rank::ranks]
    worker.compute_log_prob(tiny.batch(mine))
    if "lora" in case["name"]:
        worker.compute_log_prob(tiny.batch(mine, no_lora_adapter=True))
    found = flow_lab.stepped(worker, lambda rows=mine: tiny.batch(rows, whole=8), mine)
    found["rows"], found["weights"] = mine, tiny.weights(worker.actor.engine)
    worker.compute_log_prob(tiny.batch(mine))
    if case["captures"]:
        vars(worker.actor.engine)[old_log_probs._SAMPLES].writer.close(60.0)
    found["samples"] = SampleReader(queue).read_samples(99)
    torch.save(found, folder / f"{case['name']}-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
