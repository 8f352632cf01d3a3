"""Load new drafter weights into a running engine.

The call is ``collective_rpc("eagle_update_drafter", args=(path, version))``.

Any client of vLLM can make this call, verl's servers too. Every worker loads the file itself; the engine core
compares acceptance before and after, refreshes the bandit, and has the last good weights loaded again when
the new ones turn out worse.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights
from flashpatch.patches.eagle.vllm import capture, drafter_weights, embeddings_and_head, spec_controller
from flashpatch.patches.eagle.vllm.targets import CORE, WORKER, EnginePatch, WorkerPatch
from flashpatch.record import Contract


class DrafterRefit(DrafterVersions):
    """Follow the drafter of one engine core."""

    def __init__(self, core: Any, controller: spec_controller.SpecController) -> None:
        own = core.vllm_config.speculative_config.model or ""
        super().__init__(Weights(0, str(own)), controller.check)
        self._core = weakref.ref(core)
        self.controller = controller
        self._loading = False
        controller.on_drafts = self.observe
        controller.given_up = self.load_failed

    def workers_updated(self, path: str, version: int) -> None:
        """Record that all workers have the weights at ``path`` now, unless `load` had them loaded."""
        if not self._loading:
            self.controller.pending = None
            self.record_update(Weights(version, path))

    def load(self, weights: Weights, then: Callable[[], None]) -> None:
        """Have weights loaded before the next step."""
        self.controller.pending = lambda: self._load_now(weights, then)

    def _load_now(self, weights: Weights, then: Callable[[], None]) -> None:
        """Load weights; raises what the workers raise."""
        core = self._core()
        if core is None:
            return
        self._loading = True
        try:
            core.collective_rpc(UPDATE, None, (weights.path, weights.version))
        finally:
            self._loading = False
        then()

    def refresh_bandit(self) -> None:
        """Make the scheduler's bandit trust less what it learned with other weights."""
        self.controller.policy.refresh()


_refits: weakref.WeakKeyDictionary[Any, DrafterRefit] = weakref.WeakKeyDictionary()


def refit_of(core: Any) -> DrafterRefit | None:
    """Return the engine core's `DrafterRefit`; None if speculation is not adapted, so that acceptance is
    not followed."""
    if core not in _refits:
        controller = spec_controller.controller_of(core.scheduler)
        if controller is None:
            return None
        _refits[core] = DrafterRefit(core, controller)
    return _refits[core]


def on_rpc(original, self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: Any = None):
    """Around ``EngineCore.collective_rpc``: follow updates of drafter and policy, and answer with
    acceptance."""
    if method == UPDATE:
        path, version = _arguments(*args, **(kwargs or {}))
        result = _all_ranks(original, self, method, timeout, (path, version), None)
        refit = refit_of(self)
        if refit is not None:
            refit.workers_updated(path, version)
        return result
    if method in _METHODS:
        result = _all_ranks(original, self, method, timeout, args, kwargs)
        refit = refit_of(self) if method == FLUSH else None
        return result if refit is None else [{**result[0], **refit.state()}, *result[1:]]
    result = original(self, method, timeout, args, kwargs)
    if "weight" in getattr(method, "__name__", str(method)):  # any of vLLM's, verl's or a user's ways
        policy_updated(self)
    return result


def _all_ranks(original: Any, core: Any, method: str, timeout: Any, args: tuple, kwargs: Any) -> list[Any]:
    """Make a call that ranks may refuse, and raise the errors of all of them."""
    if core.vllm_config.parallel_config.world_size == 1:  # the exception arrives as it is
        return original(core, method, timeout, args, kwargs)
    guarded, its_args = all_ranks.wrap(method, args, kwargs)
    return all_ranks.unwrap(original(core, guarded, timeout, its_args))


def policy_updated(core: Any) -> None:
    """Note that the target may have new weights, to which the drafter does not fit."""
    refit = refit_of(core)
    if refit is not None:
        refit.policy_updated()


def _arguments(path: Any, version: int) -> tuple[str, int]:
    return str(path), int(version)


def update_drafter(self, path: str, version: int) -> dict[str, Any]:
    """Worker method: load drafter weights.

    Args:
        path: a safetensors file or a directory of them, readable by every worker.
        version: of the weights, for the ledger.

    Returns:
        ``version`` and the number of ``tensors``.

    Raises:
        PatchError: the checkpoint is not one of this drafter; nothing has changed then.
    """
    tensors = drafter_weights.update(self.model_runner, Path(path))
    engine.record_call(METHODS.id)
    ledger.note(eagle_drafter_loaded={"version": version, "path": str(path), "tensors": tensors})
    return {"version": version, "tensors": tensors}


def flush(self) -> dict[str, Any]:
    """Worker method: wait until the captured states of finished requests are stored.

    Returns:
        Counts, and ``queue``, the directory of the samples; empty from a rank that does not capture. To the
        first rank's answer the engine core adds ``drafter`` (version), ``drafter_path`` and ``acceptance``
        if speculation is adapted.
    """
    found = capture.capture_of(self.model_runner)
    if found is None or found.recorder is None:
        return {}
    found.recorder.flush()
    return {**found.recorder.counts, "queue": str(found.recorder.writer.directory)}


def save_embeddings(self, folder: str) -> int:
    """Worker method: write the token embeddings and the head that a drafter shares with the target.

    Args:
        folder: gets ``model.safetensors`` with the token embeddings and, unless they are tied, the head, both
            [vocabulary, hidden].

    Returns:
        Tensors written; 0 in ranks that leave it to the first.

    Raises:
        PatchError: the target has no plain embeddings.
    """
    return embeddings_and_head.save_embeddings_and_head(self.model_runner.get_model(), Path(folder))


_METHODS = {UPDATE: update_drafter, FLUSH: flush, SAVE_EMBEDDINGS: save_embeddings}
METHOD_NAMES = tuple(_METHODS)


def _apply(site: Site) -> None:
    for name, method in _METHODS.items():
        setattr(site.original, name, method)


def _undo(site: Site) -> None:
    for name, method in _METHODS.items():
        if vars(site.original).get(name) is method:
            delattr(site.original, name)


METHODS = WorkerPatch(
    id="eagle.vllm.worker",
    targets=(WORKER,),
    apply=_apply,
    undo=_undo,
    contract=Contract(
        exists=(
            "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
            "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
            "vllm.utils.torch_utils:set_default_torch_dtype",
            "vllm.config:set_current_vllm_config",
        ),
    ),
    evidence="optional",
    why="vLLM updates its target and never its drafter, which falls behind a policy that is trained.",
    how="Gives workers methods that collective_rpc can call.",
)

RPC = EnginePatch(
    id="eagle.vllm.collective_rpc",
    targets=(f"{CORE}.collective_rpc",),
    wrapper=on_rpc,
    contract=Contract(
        params=("method", "timeout", "args", "kwargs"), mentions=("self.model_executor.collective_rpc",)
    ),
    evidence="optional",
    when="anywhere=eagle.verl_vllm.collective_rpc",
    needs=("eagle.vllm.worker", "eagle.vllm.update_from_output"),
    why="Acceptance is seen in the scheduler, the weights are in the workers.",
    how="Compares acceptance before and after each update of the drafter, rolls back when it has fallen, and "
    "refreshes the bandit.",
)

PATCHES = (METHODS, RPC)
