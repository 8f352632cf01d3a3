"""Open and commit updates where SGLang prepares a model for new weights and post-processes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry, update_events
from flashpatch.patches.fp8.refit.errors import ASLEEP
from flashpatch.patches.fp8.sglang import initialize_model
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

_LOADER = f"{initialize_model.LOADER}:DefaultModelLoader"


_single: set[model_registry.ManagedModel] = set()
_attempted: dict[model_registry.ManagedModel, str] = {}  # why the attempt could not begin; empty: it could


def on_restore(original, model: torch.nn.Module, target_device: Any):
    """Around ``restore_weights_before_loading``: open an update in place of undoing a layer's packing."""
    managed = model_registry.get(model)
    if managed is None or managed.state == "loading":
        return original(model, target_device)
    begin(managed, BEGIN.id)
    return None


def begin(managed: model_registry.ManagedModel, patch: str) -> None:
    """Open an update, within `one_attempt` only once.

    Raises:
        PatchError: it cannot begin; or it is the second, which says why the first failed and names ``patch``.
    """
    if managed in _attempted and managed.asleep:
        raise PatchError(ASLEEP[0], patch=patch, advice=ASLEEP[1])
    if managed in _attempted:
        why = _attempted[managed] or managed.error or "the update failed"
        raise PatchError(why, patch=patch, advice="Send a complete update.")
    if managed in _single:
        _attempted[managed] = ""
    try:
        managed.begin()
    except PatchError as error:
        if managed in _attempted:
            _attempted[managed] = error.problem
        raise


@contextmanager
def one_attempt(managed: model_registry.ManagedModel) -> Iterator[None]:
    """Allow one update within: SGLang's rollback would load the same weights again."""
    _single.add(managed)
    try:
        yield
    finally:
        _single.discard(managed)
        _attempted.pop(managed, None)


def on_postprocess(original, model: torch.nn.Module, target_device: Any):
    """Around ``postprocess_weights``: the end of the first load, or of an update."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, target_device)
    if managed.state == "loading":
        original(model, target_device)
        managed.end_first_load()
        return None
    commit(managed)
    return None


def commit(managed: model_registry.ManagedModel) -> None:
    """Commit the open update, and write down what became of it."""
    try:
        managed.finish()
    finally:
        update_events.note(managed)
        ledger.flush()  # SGLang ends its processes by SIGKILL


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    scope=frozenset({"worker"}),
    remove_when=initialize_model.PATCH.remove_when,
)

BEGIN = _patch(
    id="fp8.sglang.restore_weights_before_loading",
    targets=(f"{_LOADER}.restore_weights_before_loading",),
    wrapper=on_restore,
    contract=Contract(params=("model", "target_device")),
    evidence="update",
    needs=("fp8.sglang.initialize_model",),
    why="Few quantization methods can undo their packing; for the others SGLang goes on with packed parameters.",
    how="begin_weight_update and update_weights_from_disk open an update instead.",
)

FINISH = _patch(
    id="fp8.sglang.postprocess_weights",
    targets=(f"{_LOADER}.postprocess_weights",),
    wrapper=on_postprocess,
    contract=Contract(params=("model", "target_device"), mentions=("quant_method",)),
    evidence="install",
    needs=("fp8.sglang.initialize_model",),
    why="Run twice on processed weights, post-processing corrupts them.",
    how="The first call ends the first load; later ones commit the open update and never process twice.",
)
