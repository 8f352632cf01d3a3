"""Keep the partition function in verl's own checkpoints, and out of all weights that leave the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import having, holding
from flashpatch.patches._shared.flow_names import FILE, FOLDER, HEAD, is_head, without_head
from flashpatch.patches.flowrl.actor import IMPL

logger = logging.getLogger("flashpatch.flowrl")

MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"
MERGER = "verl.model_merger.fsdp_model_merger:FSDPModelMerger"

_left_out: ContextVar[dict[str, Any] | None] = ContextVar("flashpatch_flowrl_left_out", default=None)
"""Collects the partition function's weights while a whole model is saved."""

patches = Patches(
    "flowrl",
    "verl>=0.9",
    scope="trainer",
    evidence="optional",
    why="A model exported in Hugging Face format must load anywhere.",
    remove_when="verl has a partition function of its own.",
)


@patches.wrap(
    "verl.utils.model:convert_weight_keys",
    relies_on=(
        f"{IMPL}:FSDPEngine.get_per_tensor_param",
        f"{IMPL}:FSDPEngine.get_per_tensor_param_shard",
        f"{IMPL}:FSDPEngine.get_per_tensor_param_delta_shard",
    ),
    params=("state_dict", "model"),
    evidence="update",
    why="A rollout engine has no module proj_z: vLLM refuses the update, and the trainer waits for ever.",
)
def convert_weight_keys(original, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Leave proj_z out where verl's FSDP engine names the weights it exports, before they are gathered."""
    return original(dict(without_head(state_dict.items())), *args, **kwargs)


@patches.wrap(
    f"{MERGER}._load_and_merge_state_dicts", id="flowrl.verl.load_and_merge_state_dicts", params="world_size"
)
@patches.wrap("verl.utils.fsdp_utils:get_fsdp_full_state_dict", relies_on="model.state_dict", params="model")
def get_fsdp_full_state_dict(original, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Leave proj_z out of the exported model, and keep it for `save_checkpoint` and `merge_and_save`, which write it beside."""
    state = original(*args, **kwargs)
    taken = {name: state[name] for name in state if is_head(name)}
    collected = _left_out.get()
    if collected is not None:
        collected.update(taken)
    return {name: tensor for name, tensor in state.items() if name not in taken}


@patches.wrap(
    f"{MANAGER}.save_checkpoint", relies_on=("get_fsdp_full_state_dict", "self.should_save_hf_model")
)
def save_checkpoint(original, self, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
    """Write proj_z into flowrl/proj_z.safetensors beside an exported model, from where the next actor loads it."""
    taken: dict[str, Any] = {}
    with holding(_left_out, taken):
        result = original(self, local_path, *args, **kwargs)
    if taken:
        keep(taken, Path(local_path) / "huggingface")
    return result


@patches.wrap(
    f"{MERGER}.merge_and_save",
    relies_on=("self._load_and_merge_state_dicts", "self.save_hf_model_and_tokenizer"),
)
def merge_and_save(original, self, *args: Any, **kwargs: Any) -> Any:
    """Write proj_z into flowrl/proj_z.safetensors beside a merged model, from where the next actor loads it."""
    taken: dict[str, Any] = {}
    with holding(_left_out, taken):
        result = original(self, *args, **kwargs)
    if taken and self.config.operation == "merge":
        keep(taken, Path(self.config.target_dir))
    return result


def keep(weights: dict[str, Any], model: Path) -> None:
    """Write the partition function as ``model/flowrl/proj_z.safetensors``, which only
    `flashpatch.patches.flowrl.actor.attach` loads."""
    from safetensors.torch import save_file

    (model / FOLDER).mkdir(parents=True, exist_ok=True)
    own = {name.rpartition(f"{HEAD}.")[2]: tensor.contiguous() for name, tensor in weights.items()}
    save_file(own, model / FOLDER / FILE)


@patches.wrap(
    f"{MANAGER}.load_checkpoint",
    relies_on=(
        "self.model.load_state_dict",
        "self.optimizer.load_state_dict",
        "self.lr_scheduler.load_state_dict",
    ),
    why="A checkpoint written without FlowRL lacks the partition function; verl fails with missing keys.",
)
def load_checkpoint(original, self, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
    """Add the initial partition function, its optimizer group and its learning rate to a checkpoint that has none, and log
    that; one that has them is loaded unchanged."""
    modules = getattr(
        self.model, "named_modules", tuple
    )()  # none to load into, or a stand-in without modules
    if local_path is None or not any(is_head(name) for name, _ in modules):
        return original(self, local_path, *args, **kwargs)

    def weights(state: Mapping[str, Any]) -> Mapping[str, Any]:
        if any(map(is_head, state)):
            return state
        logger.warning(
            "%s was written without FlowRL: the partition function starts from its initial weights",
            local_path,
        )
        return {**state, **{name: own for name, own in self.model.state_dict().items() if is_head(name)}}

    with (
        _filling(self.model, weights),
        _filling(self.optimizer, lambda state: with_group(state, self.optimizer.state_dict())),
        _filling(self.lr_scheduler, lambda state: with_rate(state, self.lr_scheduler.state_dict())),
    ):
        return original(self, local_path, *args, **kwargs)


def with_group(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the second parameter group to a saved optimizer state that has only the first.

    The second group's learning rate joins at the stage where the first one's is.
    """
    groups, own = saved.get("param_groups"), fresh.get("param_groups")
    if groups is None or own is None or len(groups) != 1 or len(own) != 2:
        return saved
    first = len(groups[0]["params"])
    added = {**own[1], "params": [first + at for at in range(len(own[1]["params"]))]}
    if groups[0].get("initial_lr"):
        added["lr"] = own[1]["initial_lr"] * groups[0]["lr"] / groups[0]["initial_lr"]
    return {**saved, "param_groups": [*groups, added]}


def with_rate(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the second group's learning rate to a saved schedule that has only the first's.

    The second group joins at the stage where the first one is.
    """
    one, both = saved.get("base_lrs"), fresh.get("base_lrs")
    if one is None or both is None or len(one) != 1 or len(both) != 2:
        return saved
    stage = saved["_last_lr"][0] / one[0] if one[0] else 1.0
    return {
        **saved,
        "base_lrs": [*one, both[1]],
        "_last_lr": [*saved["_last_lr"], both[1] * stage],
        "lr_lambdas": [*saved["lr_lambdas"], fresh["lr_lambdas"][1]],
    }


def _filling(holder: Any, fill: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Pass the state through ``fill`` before ``holder.load_state_dict`` inside the block."""
    if holder is None:
        return nullcontext()
    load = holder.load_state_dict
    return having(
        holder, "load_state_dict", lambda state, *args, **kwargs: load(fill(state), *args, **kwargs)
    )
