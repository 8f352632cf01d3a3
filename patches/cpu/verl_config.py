"""The recipe before anything starts: what cannot run here is refused, what means nothing here is left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.cpu import few_cores
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.cpu")

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
ID = "cpu.verl.validate_config"
UPDATES = "fp8"
"""The family that makes weight updates work, by name; bf16 is another name of it."""
_SLOTS = 16  # logical CPUs that verl's own actors ask for at the least, whatever the machine has


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``verl.utils.config.validate_config``, the first thing a trainer's driver does with its recipe.

    Raises:
        PatchError: the recipe asks for what does not run without an accelerator; all such settings are named.
    """
    from omegaconf import OmegaConf, open_dict

    engine.require("cpu")
    ledger.role("driver")

    def get(path: str, default: Any = None) -> Any:
        return OmegaConf.select(config, path, default=default)

    refused = list(refusals(get))
    if not engine.enabled(UPDATES):
        refused.append("FLASHPATCH without bf16 or fp8 (vLLM's CPU engine alone cannot load weights twice)")
    if refused:
        raise PatchError(
            f"does not run without an accelerator: {'; '.join(refused)}.",
            patch=ID,
            advice="Change these settings, or take cpu out of FLASHPATCH.",
        )
    with open_dict(config):
        for path, value in adaptations(get):
            logger.warning("%s=%s, since this machine has no accelerator", path, value)
            OmegaConf.update(config, path, value, force_add=True)
        for path, value in few_cores.adaptations(get, _starts_ray(get)):
            why = "since this machine has %d cores; set on the command line it stays"
            logger.warning(f"%s=%s, {why}", path, value, few_cores.cores())
            OmegaConf.update(config, path, value, force_add=True)
    return original(config, *args, **kwargs)


def on_run(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``verl.trainer.main_ppo.run_ppo``, the way in of trainers that never validate their recipe.

    Raises:
        PatchError: the recipe is one of a trainer that keeps trainer and rollout apart.
    """
    from omegaconf import OmegaConf

    refused = list(asynchronous(lambda path, default=None: OmegaConf.select(config, path, default=default)))
    if refused:
        raise PatchError(
            f"does not run without an accelerator: {'; '.join(refused)}.",
            patch=RUN.id,
            advice="Use verl.trainer.main_ppo, whose trainer_mode may be sync or colocate_async.",
        )
    return original(config, *args, **kwargs)


def refusals(get: Any) -> Iterator[str]:
    """Settings that cannot run here, each with the reason; ``get(path, default)`` reads the recipe."""
    for path in ("lora_rank", "lora.rank", "lora_adapter_path"):
        for model in ("actor_rollout_ref.model", "critic.model"):
            if get(f"{model}.{path}"):
                value = get(f"{model}.{path}")
                yield f"{model}.{path}={value} (vLLM's CPU engine cannot load verl's adapters)"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        strategy = get(f"{role}.strategy")
        if strategy not in (None, "fsdp", "fsdp2"):
            yield f"{role}.strategy={strategy} (fsdp and fsdp2 do)"
        for part in (role, f"{role}.fsdp_config"):
            path = f"{part}.ulysses_sequence_parallel_size"
            if get(path, 1) not in (None, 1):
                yield f"{path}={get(path)} (Ulysses needs flash-attn; with sdpa its results are wrong)"
    if get(f"{ROLLOUT}.name") not in (None, "vllm"):
        yield f"{ROLLOUT}.name={get(f'{ROLLOUT}.name')} (vllm does)"
    if get(f"{ROLLOUT}.quantization"):
        yield (
            f"{ROLLOUT}.quantization={get(f'{ROLLOUT}.quantization')} (verl's kernels need an accelerator; "
            "FLASHPATCH=cpu,fp8 quantizes with vLLM's own)"
        )
    yield from asynchronous(get)


def asynchronous(get: Any) -> Iterator[str]:
    """Trainers that keep trainer and rollout apart; ``sync`` and ``colocate_async`` do not."""
    if get("async_training") is not None:
        yield "async_training (verl.experimental.fully_async_policy sends weights through an accelerator)"
    if get(f"{ENGINE}.custom_backend_module"):
        return  # somebody else's transfer
    backend = get(f"{ENGINE}.backend", "naive")
    if backend not in (None, "naive"):
        yield f"{ENGINE}.backend={backend} (verl's engines for separate rollouts need an accelerator; naive does not)"
    if get("trainer.use_v1", True) and get("trainer.v1.trainer_mode") == "separate_async":
        yield (
            "trainer.v1.trainer_mode=separate_async (it needs a checkpoint engine other than naive, and verl's need "
            "an accelerator; sync and colocate_async run)"
        )


def adaptations(get: Any) -> Iterator[tuple[str, Any]]:
    """Settings whose usual value supposes an accelerator, with the only value that makes sense here."""
    if get("trainer.device") != "cpu":
        yield "trainer.device", "cpu"
    for name in ("free_cache_engine", "enable_sleep_mode"):
        if get(f"{ROLLOUT}.{name}", True):
            yield f"{ROLLOUT}.{name}", False
    if get("actor_rollout_ref.model.override_config.attn_implementation") is None:
        yield "actor_rollout_ref.model.override_config.attn_implementation", "sdpa"
    if _starts_ray(get):
        ranks = get("trainer.n_gpus_per_node", 1) * get("trainer.nnodes", 1)
        if get("ray_kwargs.ray_init.num_gpus") is None:
            yield "ray_kwargs.ray_init.num_gpus", ranks
        if get("ray_kwargs.ray_init.num_cpus") is None:
            yield "ray_kwargs.ray_init.num_cpus", max(os.cpu_count() or 1, _SLOTS + 4 * ranks)


def _starts_ray(get: Any) -> bool:
    """Whether this driver starts a Ray of its own, rather than joining one whose resources are given."""
    if get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS"):
        return False
    import ray

    return not ray.is_initialized()


PATCH = Patch(
    id=ID,
    targets=("verl.utils.config:validate_config",),
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(
        params=("config",),
        mentions=("config.trainer.n_gpus_per_node", "config.actor_rollout_ref.actor.strategy"),
        exists=(
            "verl.workers.config.rollout:RolloutConfig.enable_sleep_mode",
            "verl.workers.config.rollout:RolloutConfig.free_cache_engine",
            "verl.workers.config.rollout:RolloutConfig.quantization",
        ),
    ),
    evidence="install",
    scope=frozenset({"driver"}),
    needs=("cpu.verl.register_platform",),
    tested=("0.9.1",),
    why="Some settings fail minutes later in another process, or hang: sleep mode, flash attention and one "
    "Ray GPU per rank are verl's defaults; LoRA, Ulysses and verl's own quantization do not run.",
    how="Before anything starts, refuses what does not run, by name, and replaces defaults that suppose an "
    "accelerator, saying so: device, sleep mode, attention, and Ray's counts of CPUs and GPUs, which are "
    "slots, not hardware. With few cores it lowers verl's numbers of agent-loop workers, reward workers and storage "
    "units from 8 to one per two cores, and leaves Ray's dashboard out.",
    remove_when="never: it says what the family can do.",
)

RUN = Patch(
    id="cpu.verl.run_ppo",
    targets=("verl.trainer.main_ppo:run_ppo",),
    requires="verl>=0.9",
    wrapper=on_run,
    contract=Contract(params=("config",), mentions=("task_runner_class",)),
    evidence="fault",
    scope=frozenset({"driver"}),
    needs=("cpu.verl.register_platform",),
    tested=("0.9.1",),
    why="verl.experimental.fully_async_policy starts everything before it finds that it cannot send weights.",
    how="Refuses it by name in the driver.",
    remove_when="verl has a checkpoint engine for gloo.",
)
