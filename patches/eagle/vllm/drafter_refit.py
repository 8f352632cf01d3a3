"""Load new drafter weights into a running engine.

The call is ``collective_rpc("eagle_update_drafter", args=(path, version))``.

Any client of vLLM can make this call, verl's servers too. Every worker loads the file itself; the engine core records the
version and refreshes the bandit."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.eagle.drafter_refit import checkpoint, embeddings_and_head
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights
from flashpatch.patches.eagle.options import UNTIL_VLLM
from flashpatch.patches.eagle.vllm import capture, spec_controller

if TYPE_CHECKING:
    import torch

METHOD_NAMES = (UPDATE, FLUSH, SAVE_EMBEDDINGS)

patches = Patches("eagle", "vllm>=0.24", evidence="optional", remove_when=UNTIL_VLLM)


_versions: weakref.WeakKeyDictionary[Any, DrafterVersions] = weakref.WeakKeyDictionary()


def versions_of(core: Any) -> DrafterVersions | None:
    """Return the versions of the engine core's drafter; None if speculation is not adapted, so that acceptance is
    not followed."""
    if core not in _versions:
        controller = spec_controller.controller_of(core.scheduler)
        if controller is None:
            return None
        own = str(core.vllm_config.speculative_config.model or "")
        _versions[core] = DrafterVersions(own, controller.acceptance, lambda: controller.policy.refresh())
    return _versions[core]


@patches.wrap(
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    relies_on="self.model_executor.collective_rpc",
    scope="engine-core",
    when="anywhere=eagle.verl_vllm.collective_rpc",
    why="Acceptance is seen in the scheduler, the weights are in the workers.",
)
def collective_rpc(
    original, self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: Any = None
):
    """Record each update of the drafter with the acceptance before it, and refresh the bandit."""
    if method == UPDATE:
        path, version = _update_arguments(*args, **(kwargs or {}))
        result = _all_ranks(original, self, method, timeout, (path, version), None)
        versions = versions_of(self)
        if versions is not None:
            versions.record_update(Weights(version, path))
        return result
    if method in METHOD_NAMES:
        result = _all_ranks(original, self, method, timeout, args, kwargs)
        versions = versions_of(self) if method == FLUSH else None
        return result if versions is None else [{**result[0], **versions.state()}, *result[1:]]
    result = original(self, method, timeout, args, kwargs)
    if "weight" in getattr(method, "__name__", str(method)):  # any of vLLM's, verl's or a user's ways
        versions = versions_of(self)
        if versions is not None:
            versions.refresh_bandit()
    return result


def _all_ranks(original: Any, core: Any, method: str, timeout: Any, args: tuple, kwargs: Any) -> list[Any]:
    """Make a call that ranks may refuse, and raise the errors of all of them."""
    if core.vllm_config.parallel_config.world_size == 1:  # the exception arrives as it is
        return original(core, method, timeout, args, kwargs)
    guarded, its_args = all_ranks.wrap(method, args, kwargs)
    return all_ranks.unwrap(original(core, guarded, timeout, its_args))


def _update_arguments(path: Any, version: int) -> tuple[str, int]:
    return str(path), int(version)


@patches.register(
    "vllm.v1.worker.gpu_worker:Worker",
    relies_on=(
        "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
        "vllm.utils.torch_utils:set_default_torch_dtype",
        "vllm.config:set_current_vllm_config",
    ),
    scope="worker",
    why="vLLM updates its target and never its drafter, which falls behind a policy that is trained.",
)
def worker(site: Site) -> Callable[[], None]:
    """Give workers methods that collective_rpc can call."""
    methods = dict(zip(METHOD_NAMES, (update_drafter, flush, save_embeddings), strict=True))
    for name, method in methods.items():
        setattr(site.original, name, method)

    def take_away() -> None:
        for name, method in methods.items():
            if vars(site.original).get(name) is method:
                delattr(site.original, name)

    return take_away


def update_drafter(self, path: str, version: int) -> dict[str, Any]:
    """Worker method: load drafter weights from a safetensors file, or a directory of them, that every worker can read;
    return ``version``, which goes to the ledger, and the number of ``tensors``. Raises PatchError if the checkpoint is
    not one of this drafter; nothing has changed then."""
    tensors = load_drafter(self.model_runner, Path(path))
    engine.record_call(patches.of(worker).id)
    ledger.note(eagle_drafter_loaded={"version": version, "path": str(path), "tensors": tensors})
    return {"version": version, "tensors": tensors}


def flush(self, reads: bool = True) -> dict[str, Any]:
    """Worker method: wait until the captured states of finished requests are stored; return counts, and ``queue``, the
    directory of the samples, which the caller ``reads``; empty from a rank that does not capture. To the first rank's answer the engine core adds
    ``drafter`` (version), ``drafter_path`` and ``acceptance`` if speculation is adapted."""
    found = capture.capture_of(self.model_runner)
    return found.recorder.stored(reads) if found is not None and found.recorder is not None else {}


def save_embeddings(self, folder: str) -> int:
    """Worker method: write the token embeddings and, unless they are tied, the head that a drafter shares with the
    target, both [vocabulary, hidden], to ``model.safetensors`` in ``folder``. Return tensors written; 0 in ranks that
    leave it to the first. Raises PatchError if the target has no plain embeddings."""
    from vllm.distributed import tensor_model_parallel_all_gather
    from vllm.distributed.parallel_state import get_tp_group

    return embeddings_and_head.save_embeddings_and_head(
        self.model_runner.get_model(),
        Path(folder),
        lambda weight: tensor_model_parallel_all_gather(weight, dim=0),
        get_tp_group().rank_in_group == 0,
        patches.of(worker).id,
    )


def load_drafter(runner: Any, path: str | os.PathLike[str]) -> int:
    """Load the checkpoint at ``path``, a file or directory as the drafter's own, into a vLLM model runner's drafter,
    see `checkpoint`; return the number of tensors. Raises PatchError if there is no drafter that is a model, or the
    checkpoint is not one of it; nothing has changed then."""
    id = patches.of(worker).id
    drafter = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    if drafter is None or not hasattr(drafter, "load_weights"):
        raise checkpoint.problem(
            id, "this engine has no drafter with weights", "Open it with a speculative_config."
        )
    config = runner.vllm_config.speculative_config.draft_model_config
    shared = _shared(drafter, runner.get_model())
    tensors = checkpoint.load(Path(path), Path(config.model), {name for _, name in shared}, id)
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
