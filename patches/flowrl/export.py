"""Leave the partition function out of all exported weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flashpatch.patches._shared.flow_names import FILE, FOLDER, HEAD, is_head, without_head
from flashpatch.patches.flowrl.actor import IMPL
from flashpatch.record import Contract, Patch

SHARDED = "verl.utils.fsdp_utils"
MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager"
MERGER = "verl.model_merger"

_left_out: ContextVar[dict[str, Any] | None] = ContextVar("flashpatch_flowrl_left_out", default=None)
"""Collects the partition function's weights while a whole model is saved."""


def on_export(original, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Drop the partition function in ``convert_weight_keys``, which every export to a rollout calls."""
    return original(dict(without_head(state_dict.items())), *args, **kwargs)


def on_whole(original, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Drop the partition function from ``get_fsdp_full_state_dict`` and ``_load_and_merge_state_dicts``.

    Inside `_collecting`, it is collected instead of lost.
    """
    state = original(*args, **kwargs)
    taken = {name: state[name] for name in state if is_head(name)}
    collected = _left_out.get()
    if collected is not None:
        collected.update(taken)
    return {name: tensor for name, tensor in state.items() if name not in taken}


def on_save(original, self, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
    """Save the partition function beside a model that ``FSDPCheckpointManager.save_checkpoint`` exports."""
    with _collecting() as taken:
        result = original(self, local_path, *args, **kwargs)
    if taken:
        keep(taken, Path(local_path) / "huggingface")
    return result


def on_merge(original, self, *args: Any, **kwargs: Any) -> Any:
    """Save the partition function beside a model that ``FSDPModelMerger.merge_and_save`` merges."""
    with _collecting() as taken:
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


@contextmanager
def _collecting() -> Iterator[dict[str, Any]]:
    taken: dict[str, Any] = {}
    token = _left_out.set(taken)
    try:
        yield taken
    finally:
        _left_out.reset(token)


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    scope=frozenset({"trainer"}),
    remove_when="verl has a partition function of its own.",
)
_export_patch = functools.partial(
    _patch,
    evidence="optional",
    why="A model exported in Hugging Face format must load anywhere.",
    how="Leaves proj_z out of the exported model and writes it into flowrl/proj_z.safetensors beside it, "
    "from where the next actor loads it.",
)

ROLLOUT = _patch(
    id="flowrl.verl.convert_weight_keys",
    targets=("verl.utils.model:convert_weight_keys",),
    wrapper=on_export,
    contract=Contract(
        params=("state_dict", "model"),
        exists=(
            f"{IMPL}:FSDPEngine.get_per_tensor_param",
            f"{IMPL}:FSDPEngine.get_per_tensor_param_shard",
            f"{IMPL}:FSDPEngine.get_per_tensor_param_delta_shard",
        ),
    ),
    evidence="update",
    why="A rollout engine has no module proj_z: vLLM refuses the update, and the trainer waits for ever.",
    how="Leaves proj_z out where verl's FSDP engine names the weights it exports, before they are gathered.",
)

WHOLE = _export_patch(
    id="flowrl.verl.get_fsdp_full_state_dict",
    targets=(f"{SHARDED}:get_fsdp_full_state_dict",),
    wrapper=on_whole,
    contract=Contract(params=("model",), mentions=("model.state_dict",)),
)

SAVE = _export_patch(
    id="flowrl.verl.save_checkpoint",
    targets=(f"{MANAGER}:FSDPCheckpointManager.save_checkpoint",),
    wrapper=on_save,
    contract=Contract(
        params=("local_path",), mentions=("get_fsdp_full_state_dict", "self.should_save_hf_model")
    ),
)

MERGE = _export_patch(
    id="flowrl.verl.merge_and_save",
    targets=(f"{MERGER}.fsdp_model_merger:FSDPModelMerger.merge_and_save",),
    wrapper=on_merge,
    contract=Contract(mentions=("self._load_and_merge_state_dicts", "self.save_hf_model_and_tokenizer")),
)

MERGED = _export_patch(
    id="flowrl.verl.load_and_merge_state_dicts",
    targets=(f"{MERGER}.fsdp_model_merger:FSDPModelMerger._load_and_merge_state_dicts",),
    wrapper=on_whole,
    contract=Contract(params=("world_size",)),
)
