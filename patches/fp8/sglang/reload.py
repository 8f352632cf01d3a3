"""The two places where SGLang prepares a model for new weights and finishes it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import initialize_model
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

_LOADER = f"{initialize_model.LOADER}:DefaultModelLoader"


_single: set[model_registry.ManagedModel] = set()
_attempted: set[model_registry.ManagedModel] = set()


def on_restore(original, model: torch.nn.Module, target_device: Any):
    """Instead of ``restore_weights_before_loading``, which has a layer undo its packing: open an update."""
    owner = model_registry.get(model)
    if owner is None or owner.state == "loading":
        return original(model, target_device)
    if owner in _attempted:
        raise PatchError(owner.error or "the update failed", patch=BEGIN.id, advice="Send a complete update.")
    if owner in _single:
        _attempted.add(owner)
    owner.begin()
    return None


@contextmanager
def one_attempt(owner: model_registry.ManagedModel) -> Iterator[None]:
    """Within, an update can be opened once: SGLang's rollback would load the same weights again."""
    _single.add(owner)
    try:
        yield
    finally:
        _single.discard(owner)
        _attempted.discard(owner)


def on_postprocess(original, model: torch.nn.Module, target_device: Any):
    """Around ``postprocess_weights``: the end of the first load, or of an update."""
    owner = model_registry.get(model)
    if owner is None:
        return original(model, target_device)
    if owner.state == "loading":
        original(model, target_device)
        owner.end_first_load()
        return None
    try:
        owner.finish()
    finally:
        note(owner)
        ledger.flush()  # SGLang ends its processes by SIGKILL
    return None


def note(owner: model_registry.ManagedModel) -> None:
    """Where this model stands, into the ledger."""
    ledger.note(policy_version=owner.version, updates=owner.version, policy_state=owner.state)


_COMMON = dict(
    requires="sglang>=0.5.21",
    scope=frozenset({"worker"}),
    tested=("0.5.23",),
    remove_when=initialize_model.PATCH.remove_when,
)

BEGIN = Patch(
    id="fp8.sglang.restore_weights_before_loading",
    targets=(f"{_LOADER}.restore_weights_before_loading",),
    wrapper=on_restore,
    contract=Contract(params=("model", "target_device")),
    evidence="update",
    needs=("fp8.sglang.initialize_model",),
    why="Few quantization methods can undo their packing; for the others SGLang goes on with packed parameters.",
    how="begin_weight_update and update_weights_from_disk open our transaction instead.",
    **_COMMON,
)

FINISH = Patch(
    id="fp8.sglang.postprocess_weights",
    targets=(f"{_LOADER}.postprocess_weights",),
    wrapper=on_postprocess,
    contract=Contract(params=("model", "target_device"), mentions=("quant_method",)),
    evidence="install",
    needs=("fp8.sglang.initialize_model",),
    why="Run twice on processed weights, post-processing corrupts them.",
    how="The first call ends the first load; later ones commit the open update and never process twice.",
    **_COMMON,
)
