"""Know that weights are gone after sleep level 2, and keep what no update brings back.

At level 2 vLLM gives the memory of weights back. Registered buffers it saves itself, and parameters that
``sleep_preserve_parameter_names`` names. Tensors that a module holds as plain attributes, parameters that no checkpoint
brings, and a drafter it does not save, and no update of the policy restores them: they are copied to the host.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.vllm.worker import WORKER
from flashpatch.patches.fp8.vllm_lora import worker_manager
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

_saved: weakref.WeakKeyDictionary[Any, list[tuple[torch.UntypedStorage, torch.UntypedStorage]]] = (
    weakref.WeakKeyDictionary()
)  # model runner -> memory of the engine, its copy on the host


def on_sleep(original, self, level: int = 1, *args: Any, **kwargs: Any):
    """Around ``Worker.sleep``: level 2 discards the weights."""
    models = model_registry.all_models(self.model_runner)
    for model in models:
        model.asleep = True
    if level < 2:
        return original(self, level, *args, **kwargs)
    if self.model_runner not in _saved:  # else asleep already, with nothing to copy
        _saved[self.model_runner] = _copy_to_host(models)
    result = original(self, level, *args, **kwargs)
    preserved = frozenset(getattr(self, "_sleep_saved_parameters", ()))
    for model in models:
        if model.adapter.role == "target":
            model.mark_discarded(preserved)
    return result


def on_wake_up(original, self, tags: list[str] | None = None, *args: Any, **kwargs: Any):
    """Around ``Worker.wake_up``: the memory of weights is there again, and holds nothing of ours."""
    result = original(self, tags, *args, **kwargs)
    if tags is None or "weights" in tags:
        if (saved := _saved.pop(self.model_runner, None)) is not None:
            for memory, copy in saved:
                memory.copy_(copy)
            worker_manager.write_again(self.model_runner)
        for model in model_registry.all_models(self.model_runner):
            model.asleep = False
    return result


def _copy_to_host(
    models: list[model_registry.ManagedModel],
) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
    import torch

    targets = [model for model in models if model.adapter.role == "target"]
    never_loaded = [tensor for model in targets for tensor in model.never_loaded()]
    come_again = {tensor.untyped_storage()._cdata for model in targets for tensor in model.parameters()}
    come_again -= {tensor.untyped_storage()._cdata for tensor in never_loaded}
    kept = [tensor for model in targets for tensor in model.constants()] + never_loaded
    kept += [tensor for model in models if model not in targets for tensor in model.tensors()]
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage._cdata not in come_again and storage.nbytes():
            found[storage._cdata] = storage
    copies = []
    for storage in found.values():
        copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
        copies.append((storage, copy.copy_(storage)))
    return copies


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    scope=frozenset({"worker"}),
    evidence="optional",
    needs=("fp8.vllm.initialize_model",),
    remove_when="vLLM refuses to generate after sleep level 2 until weights are restored, and restores the rest.",
)

SLEEP = _patch(
    id="fp8.vllm.worker_sleep",
    targets=(f"{WORKER}.sleep",),
    wrapper=on_sleep,
    contract=Contract(params=("level",)),
    why="After sleep level 2 the weights' memory holds nothing; vLLM would generate from it, and with a drafter "
    "that nobody sends again.",
    how="Marks the policy as broken until a complete update; copies the drafter, parameters that no checkpoint brings, and "
    "what modules hold beside parameters, to the host.",
)

WAKE_UP = _patch(
    id="fp8.vllm.worker_wake_up",
    when="anywhere=fp8.vllm.worker_sleep anywhere=fp8.vllm.engine_core_wake_up",
    targets=(f"{WORKER}.wake_up",),
    wrapper=on_wake_up,
    contract=Contract(params=("tags",)),
    why="What was copied to the host before sleep level 2 must be in place before an update reads it.",
    how="Copies it back once the memory of weights is there again.",
)
