"""Load new weights into the drafter of a running worker, and into nothing else of the model.

The drafter's own checkpoint, with which the engine was opened, says which names and shapes an update must
have: exactly those, less what the drafter shares with the target. So a tensor of the target is refused by
name, and an update is read, checked and known to be whole before anything is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.patches.eagle.drafter_refit import checkpoint

if TYPE_CHECKING:
    import torch

PATCH = "eagle.vllm.worker"


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
        raise checkpoint.problem(
            PATCH, "this engine has no drafter with weights", "Open it with a speculative_config."
        )
    config = runner.vllm_config.speculative_config.draft_model_config
    tensors = checkpoint.read(Path(path), PATCH)
    shared = _shared(drafter, runner.get_model())
    names = {name for _, name in shared}
    if Path(path) == Path(config.model):  # the first checkpoint: it may hold a copy of what is shared
        tensors = {name: tensor for name, tensor in tensors.items() if not names & set(name.split("."))}
    checkpoint.check(tensors, Path(config.model), names, path, PATCH)
    with _detached(shared):
        _load(runner, drafter, config, tensors)
    return len(tensors)


def _load(runner: Any, drafter: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load through the fp8 family if it is on and wraps ``load_weights``; else as vLLM reloads a model."""
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
