"""Move the reference model to the current policy every so many steps, as async-grpo does, and keep it in checkpoints.

Policy and reference live in one process per rank, as two FSDP engines of the same model. Each rank copies its shards in
place; nothing is gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared import gathered
from flashpatch.patches._shared.flow_names import without_head
from flashpatch.patches.grpo.streaming import ID


def copy_policy(policy: Any, reference: Any) -> None:
    """Copy this rank's shards of the policy into those of the reference, both modules of verl's FSDP engines. Raises
    PatchError if the two are sharded differently; nothing was copied."""
    problem = _copy(dict(without_head(_shards(policy).items())), reference)
    if problem:
        raise PatchError(
            f"cannot refresh the reference: {problem}.",
            patch=ID,
            target="verl.workers.engine_workers:ActorRolloutRefWorker",
            advice="Give actor and ref the same strategy and fsdp_config (with flowrl, PartitionFunction in "
            "wrap_policy.transformer_layer_cls_to_wrap if that is set), or set grpo's reference_every to 0.",
        )


def save(reference: Any, policy: Any, folder: Path, rank: int, world: int) -> None:
    """Write this rank's shards of the reference to ``folder``, with the fingerprint of the policy's, saved beside it."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    shards = {name: shard.cpu() for name, shard in _shards(reference).items()}
    torch.save({"policy": _fingerprint(policy), "shards": shards}, _file(folder, rank, world))


def load(reference: Any, policy: Any, folder: Path, rank: int, world: int) -> bool:
    """Read this rank's shards of the reference from ``folder``; False if there is none: it stays the initial model, as it was then.
    Raises PatchError if they were saved by another number of ranks, of another model or beside another policy."""
    import torch

    if not folder.exists():
        return False
    file = _file(folder, rank, world)
    problem = f"{file} does not exist"
    if file.exists():
        saved = torch.load(file, map_location="cpu", weights_only=True)
        problem = "it was not saved beside this policy"
        if saved.get("policy") == _fingerprint(policy):
            problem = _copy(saved["shards"], reference)
    if problem:
        raise PatchError(
            f"cannot load the reference: {problem}.",
            patch=ID,
            target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
            advice=f"Resume with as many trainer ranks as saved it, or move {folder} away to go on from the initial model's.",
        )
    return True


def _file(folder: Path, rank: int, world: int) -> Path:
    return folder / f"rank_{rank}_of_{world}.pt"


def _fingerprint(module: Any) -> list[tuple[int, int]]:
    from flashpatch.patches._shared import fingerprint

    return [fingerprint.of(shard) for shard in _shards(module).values()]


def _shards(module: Any) -> dict[str, Any]:
    """Return each parameter's part on this rank, by name; the next forward gathers these parts."""
    from flashpatch.patches._shared import streams

    gathered.free(module)
    streams.settle()
    return {
        name: parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        for name, parameter in module.named_parameters()
    }


def _copy(sources: dict[str, Any], module: Any) -> str:
    """Copy shards into those of ``module``, or say how the two sets differ and copy nothing; "" if they fit."""
    import torch

    targets = _shards(module)
    problem = _difference(sources, targets)
    if not problem:
        with torch.no_grad():
            for name, source in sources.items():
                targets[name].copy_(source)
    return problem


def _difference(sources: dict[str, Any], targets: dict[str, Any]) -> str:
    """Say how two sets of shards differ; "" if they fit."""
    if sources.keys() != targets.keys():
        names = sorted(sources.keys() ^ targets.keys())
        return f"{len(names)} parameters are on one side only, {names[0]} first"
    for name, source in sources.items():
        if source.shape != targets[name].shape:
            return f"{name} has shards of {tuple(source.shape)} and {tuple(targets[name].shape)}"
    return ""
