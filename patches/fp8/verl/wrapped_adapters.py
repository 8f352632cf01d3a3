"""Export the LoRA adapter of a model under FSDP1, where PEFT does not find it."""

from __future__ import annotations

import re
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.record import Contract, Patch

ID = "fp8.verl.collect_lora_params"
TARGET = "verl.utils.fsdp_utils:collect_lora_params"
_NAME = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
"""A part of an adapter, whose own name PEFT leaves out of what it exports; verl's is the default one."""


def on_collect(original, module: Any, layered_summon: bool, base_sync_done: bool) -> dict[str, Any]:
    """Around ``collect_lora_params``: read an adapter of which PEFT found nothing from the state dict.

    Returns:
        verl's: name to whole tensor on the CPU.

    Raises:
        PatchError: it is not there either.
    """
    found = original(module=module, layered_summon=layered_summon, base_sync_done=base_sync_done)
    if found or not base_sync_done:
        return found
    found = _by_name(module)
    if not found:
        raise PatchError(
            "the trainer's model has a LoRA adapter, and neither PEFT nor its state dict names a tensor of it",
            patch=ID,
            target=TARGET,
            advice="Set actor_rollout_ref.actor.strategy=fsdp2, or actor_rollout_ref.model.lora.merge=True.",
        )
    return found


def _by_name(module: Any) -> dict[str, Any]:
    """Return the parts of the adapter in the state dict of a model under FSDP1, copied: its memory is freed afterwards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        state = getattr(module, "_fsdp_wrapped_module", module).state_dict()
        return {
            _NAME.sub(r"\1", name): _whole(value).detach().to("cpu", copy=True)
            for name, value in state.items()
            if "lora_" in name
        }


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


PATCH = Patch(
    id=ID,
    targets=(TARGET,),
    requires="verl>=0.9",
    wrapper=on_collect,
    contract=Contract(
        params=("module", "layered_summon", "base_sync_done"),
        mentions=("get_peft_model_state_dict", "FSDP.summon_full_params"),
    ),
    evidence="optional",
    scope=frozenset({"trainer"}),
    why="PEFT 0.21 looks for an adapter by the names of modules, which under FSDP1, verl's default, are not those of the state "
    "dict: verl exports an adapter without tensors, and stock rollouts draw from the base for ever.",
    how="Reads the adapter from the state dict by its names if PEFT found nothing.",
    remove_when="verl's adapters under FSDP1 export with PEFT 0.21.",
)
