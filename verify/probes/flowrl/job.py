"""Update a tiny actor once in verl's worker, and compute the same in float64 without verl.

Started by `flashpatch.verify.probes.flowrl.verl_probe` as a user's program, once alone and once as each of two ranks
that share every row (Ulysses): the environment switches the family on. Without an accelerator the family ``cpu`` is
enabled too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flashpatch


def main() -> None:
    """Write ``seen.json``, or the first of several ranks ``shared.json``, in the directory ``sys.argv[1]``."""
    workdir, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    if torch.accelerator.current_accelerator(check_available=True) is None:
        flashpatch.enable("cpu", "bf16")

    import verl.model_merger.fsdp_model_merger  # noqa: F401

    (alone if ranks == 1 else shared)(workdir)
    torch.distributed.destroy_process_group()


def alone(workdir: Path) -> None:
    """Update on one rank, and write what verl and what the paper's formulas say of it."""
    from flashpatch.patches.flowrl import options
    from flashpatch.verify.probes.flowrl import advantages, tiny

    chosen = options.current()
    model = tiny.write_model(workdir / "model")
    worker = tiny.worker(tiny.recipe(model))
    rows = tiny.responses()
    before, step = update(worker, rows)
    loss, log_z = paper(model, before, rows, chosen)
    result = {
        **step,
        "paper_loss": loss,
        "paper_log_z": log_z,
        "policy": sorted(name for name in before if "proj_z" not in name),
        "exported": exported(worker),
        "learned": chosen.log_z == "learned",
        "groups": groups(worker),
        "adapters": adapters(model, rows),
        "advantages": advantages.seen(),
        "paper_advantages": advantages.paper(chosen),
        "refused": refused(),
    }
    (workdir / "seen.json").write_text(json.dumps(result))


def exported(worker: Any) -> list[str]:
    """Return the names of the weights that a rollout engine gets."""
    return sorted(name for name, _ in worker.actor.engine.get_per_tensor_param()[0])


def groups(worker: Any) -> int:
    """Return how many groups of parameters the optimizer has."""
    return len(worker.actor.engine.optimizer.param_groups)


def adapters(model: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """Update the same actor with LoRA, merged for the rollout; return the step, the names that are exported, and `groups`."""
    from flashpatch.verify.probes.flowrl import tiny

    lora = (f"{tiny.MODEL}.lora_rank=4", f"{tiny.MODEL}.lora.merge=True")
    worker = tiny.worker(tiny.recipe(model, *lora))
    _, step = update(worker, rows)
    return {**step, "exported": exported(worker), "groups": groups(worker)}


def shared(workdir: Path) -> None:
    """Update on this rank's part of every row, and write what came of it from the first rank."""
    from flashpatch.verify.probes.flowrl import tiny

    model = tiny.write_model(workdir / f"model-{os.environ['RANK']}")
    worker = tiny.worker(
        tiny.recipe(
            model,
            f"trainer.n_gpus_per_node={os.environ['WORLD_SIZE']}",
            f"{tiny.MODEL}.use_remove_padding=True",
            f"{tiny.ACTOR}.ulysses_sequence_parallel_size={os.environ['WORLD_SIZE']}",
        )
    )
    _, step = update(worker, tiny.responses())
    if os.environ["RANK"] == "0":
        (workdir / "shared.json").write_text(json.dumps(step))


def update(worker: Any, rows: Sequence[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Update once; return the weights before, and the loss, log Z and how far each weight moved at most."""
    from flashpatch.verify.probes.flowrl import tiny

    before = tiny.weights(worker.actor.engine)
    metrics = tiny.metrics(worker.update_actor(tiny.batch(rows)))
    after = tiny.weights(worker.actor.engine)
    moved = {name: float((before[name] - after[name]).abs().max()) for name in before}
    return before, {"loss": metrics.get("actor/tb_loss"), "log_z": metrics.get("actor/log_z"), "moved": moved}


def paper(
    model: Path, weights: Mapping[str, torch.Tensor], rows: Sequence[Any], chosen: Any
) -> tuple[float, float | None]:
    """Return mean loss and mean log Z of the rows, from transformers' model in float64 and `paper`.

    Without a partition function log Z is 0 in the loss, as it is in the advantages, and None is returned for it.

    Args:
        model: the model's folder.
        weights: by name, those of the partition function among them.
        rows: as `tiny.responses` gives them.
        chosen: the family's options.
    """
    from transformers import AutoModelForCausalLM

    from flashpatch.verify.probes.flowrl.paper import partition, response_loss

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    learned = chosen.log_z == "learned"
    layers = [
        (weights[f"proj_z.net.{4 * at}.weight"].tolist(), weights[f"proj_z.net.{4 * at}.bias"].tolist())
        for at in range(chosen.num_layers if learned else 0)
    ]
    losses, log_zs = [], []
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.answer]])
        with torch.no_grad():
            output = policy(ids, output_hidden_states=True)
        means = output.hidden_states[-1][0, : len(row.prompt)].mean(0).tolist()
        log_zs.append(partition(means, layers) if learned else 0.0)
        table = output.logits[0].log_softmax(-1)
        log_p = [float(table[len(row.prompt) - 1 + at, token]) for at, token in enumerate(row.answer)]
        losses.append(
            response_loss(
                log_zs[-1],
                log_p,
                row.old,
                row.ref,
                row.reward,
                beta=chosen.beta,
                epsilon=0.2,
                weight=chosen.weight,
                length=chosen.length,
            )
        )
    return sum(losses) / len(losses), sum(log_zs) / len(log_zs) if learned else None


def refused() -> str:
    """Return the error with which verl's config validation refuses Megatron; empty if it does not.

    Call it last: it disables ``cpu``, which refuses Megatron as well.
    """
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    from flashpatch.errors import PatchError
    from flashpatch.patches.flowrl import verl_config

    recipe = {
        "actor_rollout_ref": {"actor": {"strategy": "megatron"}},
        "algorithm": {"adv_estimator": "grpo"},
    }
    flashpatch.disable("cpu")
    try:
        validate_config(OmegaConf.create(recipe), False, False)
    except PatchError as error:
        own = verl_config.patches.of(verl_config.validate_config).id
        return str(error) if error.patch == own else f"not refused by {own}: {error}"
    return ""
