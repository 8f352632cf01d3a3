"""New drafter weights into a running engine: ``collective_rpc("eagle_update_drafter", args=(path, version))``.

Any client of vLLM can make this call, verl's servers too. Every worker loads the file itself; the engine core
notes acceptance before and after, tells the bandit, and has the last good weights loaded again when the new
ones turn out worse.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.eagle.vllm import capture, drafter_weights, embeddings_and_head, spec_controller
from flashpatch.patches.eagle.vllm.targets import CORE, TEXT, WORKER, WORKERS
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.eagle")

UPDATE = "eagle_update_drafter"
FLUSH = "eagle_flush"
SHARED = "eagle_save_shared"


class Sync:
    """Drafter versions of one engine core.

    Attributes:
        good: path and version of the weights to go back to.
        current: path and version of the weights that are in use.
        log: one entry per event, newest last.
    """

    def __init__(self, core: Any, controller: spec_controller.Controller) -> None:
        own = core.vllm_config.speculative_config.model or ""
        self._core = weakref.ref(core)
        self.controller = controller
        self.good = self.current = (str(own), 0)
        self.log: list[dict[str, Any]] = []
        self.trial = controller.trial
        self._returning = False
        controller.on_drafts = self.step

    def updated(self, path: str, version: int) -> None:
        """All workers have the weights at ``path`` now."""
        self.controller.policy.refresh()
        self.current = (path, version)
        if self._returning:
            self.trial.abandon()
            return
        self.controller.pending = None
        self._note(event="update", version=version, path=path, before=self.trial.begin())

    def state(self) -> dict[str, Any]:
        """The weights in use, and tokens per step over the last ``rollback_steps`` speculative steps."""
        return {"drafter": self.current[1], "drafter_path": self.current[0], "acceptance": self.trial.length}

    def step(self, tally: Any) -> None:
        verdict = self.trial.step(tally)
        if verdict is None:
            return
        before, after, keep = verdict
        self._note(event="kept" if keep else "worse", version=self.current[1], before=before, after=after)
        if keep:
            self.good = self.current
        else:
            logger.warning(
                "drafter %s made acceptance worse, %.2f after %.2f tokens per step: going back to %s",
                self.current[1],
                after,
                before,
                self.good[1],
            )
            self.controller.pending = self.go_back

    def go_back(self) -> None:
        """Load the last good weights again; raises what the workers raise."""
        core = self._core()
        if core is None:
            return
        self._returning = True
        try:
            core.collective_rpc(UPDATE, None, self.good)
        finally:
            self._returning = False
        self._note(event="rollback", version=self.good[1], path=self.good[0])

    def _note(self, **event: Any) -> None:
        self.log.append(event)
        del self.log[:-32]
        logger.info("drafter: %s", event)
        ledger.note(eagle_drafter={"version": self.current[1], "path": self.current[0], "log": self.log[-8:]})


_syncs: weakref.WeakKeyDictionary[Any, Sync] = weakref.WeakKeyDictionary()


def of(core: Any) -> Sync | None:
    """The engine core's `Sync`; None where speculation is not adapted, so that acceptance is not followed."""
    if core not in _syncs:
        controller = spec_controller.of(core.scheduler)
        if controller is None:
            return None
        _syncs[core] = Sync(core, controller)
    return _syncs[core]


def on_rpc(original, self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: Any = None):
    """Around ``EngineCore.collective_rpc``: what the engine core knows is added to what its workers do."""
    if method == UPDATE:
        path, version = _arguments(*args, **(kwargs or {}))
        result = _all_ranks(original, self, method, timeout, (path, version), None)
        sync = of(self)
        if sync is not None:
            sync.updated(path, version)
        return result
    if method in _METHODS:
        result = _all_ranks(original, self, method, timeout, args, kwargs)
        sync = of(self) if method == FLUSH else None
        return result if sync is None else [{**result[0], **sync.state()}, *result[1:]]
    result = original(self, method, timeout, args, kwargs)
    if "weight" in getattr(method, "__name__", str(method)):  # any of vLLM's, verl's or a user's ways
        policy_updated(self)
    return result


def _all_ranks(original: Any, core: Any, method: str, timeout: Any, args: tuple, kwargs: Any) -> list[Any]:
    """A call that may be refused: by all ranks, so that all of them are heard."""
    if core.vllm_config.parallel_config.world_size == 1:  # the exception arrives as it is
        return original(core, method, timeout, args, kwargs)
    guarded, its_args = all_ranks.wrap(method, args, kwargs)
    return all_ranks.unwrap(original(core, guarded, timeout, its_args))


def policy_updated(core: Any) -> None:
    """The target may have new weights, which the drafter knows nothing of: the bandit is to look again."""
    controller = spec_controller.of(core.scheduler)
    if controller is not None:
        controller.policy.refresh()


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
    """Worker method: wait until what was captured of finished requests is filed.

    Returns:
        What was counted, and ``ring``, the directory; nothing from a rank that does not capture. To the first rank's
        the engine core adds ``drafter`` (version), ``drafter_path`` and ``acceptance`` where speculation is adapted.
    """
    held = capture.of(self.model_runner)
    if held is None or held.recorder is None:
        return {}
    held.recorder.flush()
    return {**held.recorder.counts, "ring": str(held.recorder.writer.directory)}


def save_shared(self, folder: str) -> int:
    """Worker method: write what a drafter shares with the target, as the policy has it now.

    Args:
        folder: gets ``model.safetensors`` with the token embeddings and, unless they are tied, the head, both
            [vocabulary, hidden].

    Returns:
        Tensors written; 0 in ranks that leave it to the first.

    Raises:
        PatchError: the target has no plain embeddings.
    """
    return embeddings_and_head.save(self.model_runner.get_model(), Path(folder))


_METHODS = {UPDATE: update_drafter, FLUSH: flush, SHARED: save_shared}
METHOD_NAMES = tuple(_METHODS)


def _apply(site: Site) -> None:
    for name, method in _METHODS.items():
        setattr(site.original, name, method)


def _undo(site: Site) -> None:
    for name, method in _METHODS.items():
        if vars(site.original).get(name) is method:
            delattr(site.original, name)


METHODS = Patch(
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
    **WORKERS,
)

RPC = Patch(
    id="eagle.vllm.collective_rpc",
    targets=(f"{CORE}.collective_rpc",),
    wrapper=on_rpc,
    contract=Contract(
        params=("method", "timeout", "args", "kwargs"), mentions=("self.model_executor.collective_rpc",)
    ),
    evidence="optional",
    needs=("eagle.vllm.worker", "eagle.vllm.update_from_output"),
    why="Acceptance is seen in the scheduler, the weights are in the workers.",
    how="Follows acceptance around each update of the drafter, goes back when it has fallen, and tells the bandit.",
    **TEXT,
)

PATCHES = (METHODS, RPC)
