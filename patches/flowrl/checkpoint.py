"""Keep the partition function in verl's own checkpoints, and out of all weights that leave the trainer."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.checkpoint_shapes import fingerprint
from flashpatch.patches._shared.context import having, holding
from flashpatch.patches._shared.flow_names import FILE, FOLDER, HEAD, is_head, without_head
from flashpatch.patches.flowrl.actor import IMPL

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
    keep(taken, Path(local_path or "") / "huggingface")
    return result


@patches.wrap(
    f"{MERGER}.merge_and_save",
    relies_on=("self._load_and_merge_state_dicts", "self.save_hf_model_and_tokenizer"),
)
def merge_and_save(original, self, *args: Any, **kwargs: Any) -> Any:
    """Write proj_z into flowrl/proj_z.safetensors beside a merged model, before it is uploaded; the next actor loads it."""
    taken, save = {}, self.save_hf_model_and_tokenizer

    def save_both(state: dict[str, Any]) -> None:
        save(state)
        keep(taken, Path(self.config.target_dir))

    with holding(_left_out, taken), having(self, "save_hf_model_and_tokenizer", save_both):
        return original(self, *args, **kwargs)


def keep(weights: dict[str, Any], model: Path) -> None:
    """Write the partition function, if there is one, as ``model/flowrl/proj_z.safetensors``, with the fingerprint of the model
    beside which only `flashpatch.patches.flowrl.actor.attach` loads it."""
    from safetensors.torch import save_file

    if weights:
        (model / FOLDER).mkdir(parents=True, exist_ok=True)
        own = {name.rpartition(f"{HEAD}.")[2]: tensor.contiguous() for name, tensor in weights.items()}
        save_file(own, model / FOLDER / FILE, {"model": fingerprint(model)})
