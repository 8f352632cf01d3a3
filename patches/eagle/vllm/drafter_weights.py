"""Load new weights into the drafter of a running worker, and into nothing else of the model.

The drafter's own checkpoint, with which the engine was opened, says which names and shapes an update must
have: exactly those, less what the drafter shares with the target. So a tensor of the target is refused by
name, and an update is read, checked and known to be whole before anything is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.errors import PatchError

if TYPE_CHECKING:
    import torch

PATCH = "eagle.vllm.worker"
_SHOWN = 4  # names in a message


def update(runner: Any, path: str | os.PathLike[str]) -> int:
    """Load the checkpoint at ``path`` into the runner's drafter; return the number of tensors.

    Args:
        runner: a vLLM model runner with a drafter that is a model.
        path: a safetensors file, or a directory of them, named as the drafter's own checkpoint is.

    Raises:
        PatchError: there is no such drafter, or the checkpoint is not one of it; nothing has changed then.
    """
    drafter = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    if drafter is None or not hasattr(drafter, "load_weights"):
        raise _problem("this engine has no drafter with weights", "Open it with a speculative_config.")
    config = runner.vllm_config.speculative_config.draft_model_config
    tensors = read(Path(path))
    shared = _shared(drafter, runner.get_model())
    names = {name for _, name in shared}
    if Path(path) == Path(config.model):  # the first checkpoint: it may hold a copy of what is shared
        tensors = {name: tensor for name, tensor in tensors.items() if not names & set(name.split("."))}
    _check(tensors, Path(config.model), names, path)
    with _detached(shared):
        _load(runner, drafter, config, tensors)
    return len(tensors)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, by name.

    Raises:
        PatchError: there is none, or a file is damaged.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            tensors |= load_file(file)
        except Exception as error:  # safetensors raises errors of its own beside OSError
            raise _problem(f"{file} cannot be read: {error}", "Write the checkpoint again.") from error
    if not tensors:
        raise _problem(f"{path} holds no safetensors", "Give a safetensors file or a directory of them.")
    return tensors


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor of a checkpoint from the files' headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in _files(path):
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found |= {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    return found


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.exists() else []


def _check(tensors: Mapping[str, torch.Tensor], own: Path, shared: set[str], path: Any) -> None:
    """Raise unless ``tensors`` are the drafter's, all of them and sound."""
    theirs = sorted(name for name in tensors if shared & set(name.split(".")))
    if theirs:
        raise _problem(
            f"{path} holds {_list(theirs)}, which this drafter shares with the target",
            "Leave them out: the target's update brings them.",
        )
    wanted = {name: shape for name, shape in shapes(own).items() if not shared & set(name.split("."))}
    if wanted:  # else the engine fetched its checkpoint from elsewhere
        extra = sorted(tensors.keys() - wanted.keys())
        missing = sorted(wanted.keys() - tensors.keys())
        if extra or missing:
            problems = [f"has {_list(extra)}, unknown to the drafter"] if extra else []
            problems += [f"lacks {_list(missing)}"] if missing else []
            raise _problem(f"{path} {' and '.join(problems)}", f"Send all tensors of {own}, under its names.")
        wrong = [name for name, shape in wanted.items() if tuple(tensors[name].shape) != shape]
        if wrong:
            name = wrong[0]
            raise _problem(
                f"{name} in {path} has shape {tuple(tensors[name].shape)}, not {wanted[name]}",
                "Train the drafter that this engine was opened with.",
            )
    broken = [
        n for n, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if broken:
        raise _problem(
            f"{_list(sorted(broken))} in {path} holds NaN or infinity", "Look at the drafter's training."
        )


def _load(runner: Any, drafter: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load through the fp8 family where it is on and wraps ``load_weights``; else as vLLM reloads a model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    if engine.enabled("fp8") and "load_weights" in vars(drafter):
        drafter.load_weights(iter(tensors.items()), partial=True)
        return
    with set_current_vllm_config(runner.vllm_config), set_default_torch_dtype(config.dtype):
        initialize_layerwise_reload(drafter)
        drafter.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(drafter, config)


def _shared(drafter: Any, target: Any) -> list[tuple[Any, str]]:
    """Find the target's modules in the drafter; return their parents there and their names."""
    theirs = {id(module) for module in target.modules()}
    found = []
    for parent in drafter.modules():
        if id(parent) not in theirs:
            found += [(parent, name) for name, child in parent._modules.items() if id(child) in theirs]
    return found


@contextmanager
def _detached(shared: list[tuple[Any, str]]) -> Iterator[None]:
    """Take the shared modules out of the drafter meanwhile, so that no loader can reach them."""
    held = [
        (parent, dict(parent._modules)) for parent in {id(parent): parent for parent, _ in shared}.values()
    ]
    for parent, name in shared:
        del parent._modules[name]
    try:
        yield
    finally:
        for parent, modules in held:
            parent._modules.clear()
            parent._modules.update(modules)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _problem(problem: str, advice: str) -> PatchError:
    return PatchError(f"{problem}.", patch=PATCH, advice=advice)
