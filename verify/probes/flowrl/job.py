"""Update a tiny actor once in verl's worker, and compute the same in float64 without verl.

As a user's program, once alone and once as each of two ranks that share every row (Ulysses): the environment switches the
family on."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor
from flashpatch.verify.probes.flowrl import tiny
from flashpatch.verify.probes.flowrl.paper import group_log_z, partition, response_loss

GROUPS = ("b", "a", "b", "a", "a", "b")  # of each response
REWARDS = (1.0, 0.0, 0.0, 0.5, 1.0, 0.0)
LENGTHS = (1, 2, 3, 3, 2, 1)  # tokens
OLD, REF = (
    tuple(tuple(-first - 0.1 * row - 0.05 * at for at in range(length)) for row, length in enumerate(LENGTHS))
    for first in (1.0, 1.2)
)
"""Log-probabilities of their tokens."""


def alone(workdir: Path, seen: dict[str, Any]) -> None:
    """Update on one rank, and note what verl and what the paper's formulas say of it."""
    verl_actor.on_cpu("cpu", "bf16")
    import verl.model_merger.fsdp_model_merger  # noqa: F401

    from flashpatch.patches.flowrl import options

    chosen = options.current()
    model = tiny.write_model(workdir / "model")
    worker = tiny.worker(tiny.recipe(model))
    rows = tiny.responses()
    before, step = update(worker, rows)
    jobs.tell(workdir, "verl's worker has updated the policy")
    loss, log_z = paper(model, before, rows, chosen)
    seen |= {
        **step,
        "paper_loss": loss,
        "paper_log_z": log_z,
        "policy": sorted(name for name in before if "proj_z" not in name),
        **rollout(worker),
        "learned": chosen.log_z == "learned",
        "advantages": advantages(),
        "paper_advantages": paper_advantages(chosen),
    }
    lora = (f"{tiny.MODEL}.lora_rank=4", f"{tiny.MODEL}.lora.merge=True")  # merged for the rollout
    adapted = tiny.worker(tiny.recipe(model, *lora))
    seen["adapters"] = {**update(adapted, rows)[1], **rollout(adapted)}
    torch.distributed.destroy_process_group()


def rollout(worker: Any) -> dict[str, Any]:
    """Return the names of the weights that a rollout engine gets, and how many groups of parameters the optimizer has."""
    engine = worker.actor.engine
    names = sorted(name for name, _ in engine.get_per_tensor_param()[0])
    return {"exported": names, "groups": len(engine.optimizer.param_groups)}


def shared(workdir: Path, seen: dict[str, Any]) -> None:
    """Update on this rank's part of every row, and note what came of it."""
    verl_actor.on_cpu("cpu", "bf16")
    model, ranks = tiny.write_model(workdir / f"model-{os.environ['RANK']}"), os.environ["WORLD_SIZE"]
    together = (
        f"trainer.n_gpus_per_node={ranks}",
        f"{tiny.MODEL}.use_remove_padding=True",
        f"{tiny.ACTOR}.ulysses_sequence_parallel_size={ranks}",
    )
    seen |= update(tiny.worker(tiny.recipe(model, *together)), tiny.responses())[1]
    torch.distributed.destroy_process_group()


def update(worker: Any, rows: Sequence[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Update once; return the weights before, and the loss, log Z and how far each weight moved at most."""
    before = tiny.weights(worker.actor.engine)
    metrics = tiny.metrics(worker.update_actor(tiny.batch(rows)))
    after = tiny.weights(worker.actor.engine)
    moved = {name: float((before[name] - after[name]).abs().max()) for name in before}
    return before, {"loss": metrics.get("actor/tb_loss"), "log_z": metrics.get("actor/log_z"), "moved": moved}


def paper(
    model: Path, weights: Mapping[str, torch.Tensor], rows: Sequence[Any], chosen: Any
) -> tuple[float, float | None]:
    """Return mean loss and mean log Z of the rows under weights by name, from transformers' model in float64 and `paper`.

    Without a partition function log Z is 0 in the loss, as it is in the advantages, and None is returned for it."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    learned = chosen.log_z == "learned"
    layers = [
        (weights[f"proj_z.net.{4 * at}.weight"].double(), weights[f"proj_z.net.{4 * at}.bias"].double())
        for at in range(chosen.num_layers if learned else 0)
    ]
    losses, log_zs = [], []
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.answer]])
        with torch.no_grad():
            output = policy(ids, output_hidden_states=True)
        means = output.hidden_states[-1][0, : len(row.prompt)].mean(0)
        log_zs.append(partition(means, layers) if learned else 0.0)
        table = output.logits[0].log_softmax(-1)
        log_p = [float(table[len(row.prompt) - 1 + at, token]) for at, token in enumerate(row.answer)]
        options = dict(beta=chosen.beta, epsilon=0.2, weight=chosen.weight, length=chosen.length)
        losses.append(response_loss(log_zs[-1], log_p, row.old, row.ref, row.reward, **options))
    return sum(losses) / len(losses), sum(log_zs) / len(log_zs) if learned else None


def advantages() -> list[float]:
    """Return what verl's driver computes: each response's advantage, the same at all of its tokens."""
    import numpy
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer

    def padded(rows: Any) -> torch.Tensor:
        return torch.tensor([[*row, *[0.0] * (max(LENGTHS) - len(row))] for row in rows])

    tensors = {
        "old_log_probs": padded(OLD),
        "ref_log_prob": padded(REF),
        "response_mask": padded([[1.0] * length for length in LENGTHS]).long(),
        "token_level_rewards": padded([[0.0] * (n - 1) + [r] for n, r in zip(LENGTHS, REWARDS, strict=True)]),
    }
    data = DataProto.from_dict(tensors, {"uid": numpy.array(GROUPS, dtype=object)})
    found = ray_trainer.compute_advantage(data, "grpo").batch["advantages"]
    rows = [row[:length].tolist() for row, length in zip(found, LENGTHS, strict=True)]
    if any(max(row) - min(row) > 1e-6 for row in rows):
        raise ValueError(f"advantages differ within a response: {rows}")
    return [row[0] for row in rows]


def paper_advantages(chosen: Any) -> list[float]:
    """Return what ``reward`` and ``log_z`` of the family's options say the advantages are."""
    groups = [[at for at, group in enumerate(GROUPS) if group == name] for name in sorted(set(GROUPS))]
    found = list(REWARDS)
    for mine in groups if chosen.reward == "advantage" else ():
        mean = math.fsum(REWARDS[at] for at in mine) / len(mine)
        deviation = math.sqrt(math.fsum((REWARDS[at] - mean) ** 2 for at in mine) / (len(mine) - 1))
        for at in mine:
            found[at] = (REWARDS[at] - mean) / (deviation + 1e-6)
    for mine in groups if chosen.log_z == "group" else ():
        shares = [LENGTHS[at] if chosen.length == "mean" else 1 for at in mine]
        away = [math.fsum(REF[at]) - math.fsum(OLD[at]) for at in mine]
        alone = [chosen.beta * found[at] + a / n for at, a, n in zip(mine, away, shares, strict=True)]
        log_z = group_log_z(alone, shares)
        for at in mine:
            found[at] -= log_z / chosen.beta
    return found
