"""Steps verl's own actor worker through cases, writes what each gave: ``python flow_job.py DIR CASES.json``.

A case is a table:

name       of its result, ``NAME-WORLD.pt``: ``before``, ``after`` (weights by name), ``metrics`` per step
overrides  of verl's recipe
options    of the family
model      folder name of the model, made when it is not there
steps      how often to update, 1
extra      of the batch
save, load folder names of verl checkpoints: written at the end, or read at the start
apart      true: ``exported`` is a pair, of weights without adapters and of adapters, as for engines that merge them"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import flashpatch
from flashpatch.patches.flowrl import options
from flashpatch.verify.probes.flowrl import tiny


def main(folder: Path, file: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for case in json.loads((folder / file).read_text()):
        defaults = {name: option.default for name, option in options.OPTIONS.items()}
        flashpatch.enable("flowrl", **{**defaults, **case.get("options", {})})
        written = step(folder, case, world)
        if rank == 0:
            torch.save(written, folder / f"{case['name']}-{world}.pt")


def step(folder: Path, case: dict[str, Any], world: int) -> dict[str, Any]:
    model = folder / case.get("model", "model")
    if not model.exists():
        raise SystemExit(f"no {model}")
    config = tiny.recipe(
        model, "trainer.device=cpu", f"trainer.n_gpus_per_node={world}", *case.get("overrides", ())
    )
    torch.manual_seed(0)  # from which adapters are drawn
    worker = tiny.worker(config)
    engine = worker.actor.engine
    if "load" in case:
        worker.load_checkpoint(str(folder / case["load"]))
    before = tiny.weights(engine)
    metrics = []
    for at in range(case.get("steps", 1)):
        everyone = tiny.responses(seed=case.get("first", 0) + at)
        share = slice(engine.get_data_parallel_rank(), None, engine.get_data_parallel_size())
        mine = everyone[share]
        extra = {
            name: value[share] if isinstance(value, list) else value
            for name, value in case.get("extra", {}).items()
        }
        metrics.append(tiny.metrics(worker.update_actor(tiny.batch(mine, len(everyone), **extra))))
    after = tiny.weights(engine)
    exported = names(engine)
    if case.get("apart"):
        engine.model_config.lora["merge"] = False  # only here: an engine on a CPU takes whole weights
        exported = [names(engine, base_sync_done=adapters) for adapters in (False, True)]
    if "save" in case:
        worker.save_checkpoint(str(folder / case["save"]), global_step=1)
    return {"before": before, "after": after, "metrics": metrics, "exported": exported}


def names(engine: FSDPEngine, **how: bool) -> list[str]:
    """The names of the weights that a rollout gets."""
    return sorted(name for name, _ in engine.get_per_tensor_param(**how)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
