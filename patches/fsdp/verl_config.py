"""The recipe before anything starts: what the audit cannot follow is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashpatch import engine, ledger, registry
from flashpatch.arming.preflight import examine
from flashpatch.errors import PatchError
from flashpatch.record import Contract, Patch

ID = "fsdp.verl.validate_config"
ROLE = "actor_rollout_ref"
CARRIERS = ("naive", "nccl", "hccl", "nixl")
"""verl's checkpoint engines that carry each tensor as it is; mooncake and kimi cast all to one dtype."""
TRANSFER = "fp8.verl.receiver_init_socket"
"""The patch that tells the trainer of a refused update, by id: a family does not import another."""


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``verl.utils.config.validate_config``.

    Raises:
        PatchError: the recipe sends weights along a way that the audit does not follow.
    """
    from omegaconf import OmegaConf

    engine.require("fsdp")
    ledger.role("driver")
    mode, every = (engine.options("fsdp")[name] for name in ("audit", "audit_every"))
    if every < 1:
        raise PatchError(
            f"audit_every is {every}.", patch=ID, advice="1 looks at each sync, 2 at each second."
        )

    def get(path: str, default: Any = None) -> Any:
        return OmegaConf.select(config, path, default=default)

    refused = list(refusals(get, mode))
    if mode == "refuse" and (without := _unheard()):
        refused.append(f"{without} (stock verl's trainer waits for ever for a refused update)")
    if refused:
        raise PatchError(
            f"the audit of weight syncs does not follow {'; '.join(refused)}.",
            patch=ID,
            advice="Change these settings, or set the option audit of fsdp to report or off.",
        )
    return original(config, *args, **kwargs)


def _unheard() -> str | None:
    """What is missing for a refused update to reach the trainer, or None."""
    if not engine.enabled("fp8"):
        return "FLASHPATCH without bf16 or fp8"
    problem = examine(registry.patch(TRANSFER)).problem
    return f"a verl on which {TRANSFER} cannot be armed: {problem}" if problem else None


def refusals(get: Any, mode: str) -> Iterator[str]:
    """Settings that the audit does not follow; ``get(path, default)`` reads the recipe.

    Under "report", weights that cannot be traced back to shards travel unaudited, and that is said then.
    """
    if mode == "off":
        return
    rollout = get(f"{ROLE}.rollout.name")
    if rollout not in (None, "vllm"):
        yield f"{ROLE}.rollout.name={rollout} (vllm's worker is where it looks)"
    strategy = get(f"{ROLE}.actor.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ROLE}.actor.strategy={strategy} (it reads the shards of fsdp and fsdp2)"
    backend = get(f"{ROLE}.rollout.checkpoint_engine.backend")
    if backend not in (None, *CARRIERS):
        path = f"{ROLE}.rollout.checkpoint_engine.backend"
        yield f"{path}={backend} (it recasts what it carries or sends differences)"
    if mode != "refuse":
        return
    for path in ("lora_rank", "lora.rank", "lora_adapter_path"):
        if get(f"{ROLE}.model.{path}"):
            yield f"{ROLE}.model.{path}={get(f'{ROLE}.model.{path}')} (an adapter is no shard's value)"
    if get(f"{ROLE}.actor.fsdp_config.qat.enable", False):
        yield f"{ROLE}.actor.fsdp_config.qat.enable=True (what is sent is quantized)"


PATCH = Patch(
    id=ID,
    targets=("verl.utils.config:validate_config",),
    requires="verl>=0.7",
    wrapper=on_validate,
    contract=Contract(params=("config",), mentions=("config.actor_rollout_ref.actor.strategy",)),
    evidence="install",
    scope=frozenset({"driver"}),
    tested=("0.9.1",),
    why="An audit that does not reach what is sent would look like one that found nothing.",
    how="Refuses, before anything starts, rollouts, strategies, transports and adapters it does not follow.",
    remove_when="never: it says what the audit can do.",
)
