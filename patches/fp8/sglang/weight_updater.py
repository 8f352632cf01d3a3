"""The updates of one model runner: an error is an answer to whoever sent the weights, never the scheduler's death."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import initialize_model, reload
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fp8")

failures: list[str] = []
"""What went wrong since the last session began."""

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"


def on_tensor(original, self, named_tensors: Any, load_format: str | None = None):
    """Around ``update_weights_from_tensor``."""
    if model_registry.get(self.get_model()) is None:
        return original(self, named_tensors, load_format)

    def load() -> tuple[bool, str]:
        if load_format not in (None, "flattened_bucket"):
            raise PatchError(
                f"load_format={load_format!r} writes into processed weights, past the transaction",
                patch=TENSOR.id,
                advice="Leave load_format out, or use flattened_bucket.",
            )
        return original(self, named_tensors, load_format)

    return answered(load)


def on_distributed(original, self, named_tensors: Any):
    """Around ``load_weights_from_distributed``."""
    if model_registry.get(self.get_model()) is None:
        return original(self, named_tensors)
    return answered(lambda: original(self, named_tensors))


def on_disk(original, self, model_path: str, *args: Any, **kwargs: Any):
    """Around ``update_weights_from_disk``.

    After a failure SGLang "rolls back" by loading the same new path once more; that attempt is stopped, and the
    path it has already set is put back.
    """
    owner = model_registry.get(self.get_model())
    if owner is None:
        return original(self, model_path, *args, **kwargs)
    config, path = self.model_config, self.model_config.model_path
    with reload.one_attempt(owner):
        done, message = answered(lambda: original(self, model_path, *args, **kwargs))
    reload.note(owner)
    if not done:
        config.model_path = path
        message = owner.error or message
    return done, message


def on_ipc(original, self, recv_req: Any):
    """Around ``update_weights_from_ipc``: the checkpoint engine processes quantized layers itself."""
    if model_registry.get(self.get_model()) is None:
        return original(self, recv_req)
    return False, str(
        PatchError(
            "update_weights_from_ipc processes quantized layers a second time",
            patch=IPC.id,
            advice="Use update_weights_from_tensor, _from_distributed or _from_disk.",
        )
    )


def answered(update: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """What ``update`` answers, or its exception as an answer."""
    try:
        return update()
    except Exception as error:
        logger.exception("a weight update failed")
        message = "".join((str(error), *(f" {note}" for note in getattr(error, "__notes__", ()))))
        failures.append(message)
        return False, message


_COMMON = dict(
    requires="sglang>=0.5.21",
    evidence="optional",  # an engine is updated through one of these doors
    scope=frozenset({"worker"}),
    tested=("0.5.23",),
    needs=("fp8.sglang.initialize_model",),
    remove_when=initialize_model.PATCH.remove_when,
)

TENSOR = Patch(
    id="fp8.sglang.update_weights_from_tensor",
    targets=(f"{UPDATER}.update_weights_from_tensor",),
    wrapper=on_tensor,
    contract=Contract(params=("named_tensors", "load_format"), mentions=("self.get_model",)),
    why="An exception out of a loader ends the scheduler, and that its parent.",
    how="Answers success=False with the reason. Refuses load formats that write past the model's load_weights.",
    **_COMMON,
)

DISTRIBUTED = Patch(
    id="fp8.sglang.load_weights_from_distributed",
    targets=(f"{UPDATER}.load_weights_from_distributed",),
    wrapper=on_distributed,
    contract=Contract(params=("named_tensors",), mentions=("self.get_model",)),
    why="SGLang's own answer says that weights are partially updated, whatever has happened.",
    how="Answers with what the transaction did.",
    **_COMMON,
)

DISK = Patch(
    id="fp8.sglang.runner_update_weights_from_disk",
    targets=(f"{UPDATER}.update_weights_from_disk",),
    wrapper=on_disk,
    contract=Contract(
        params=("model_path", "load_format"),
        mentions=("self.model_config.model_path", "DefaultModelLoader.restore_weights_before_loading"),
    ),
    why="SGLang's rollback loads the new path again, and raises when that fails too.",
    how="Stops the second attempt, puts the path back and answers with the first error.",
    **_COMMON,
)

IPC = Patch(
    id="fp8.sglang.update_weights_from_ipc",
    targets=(f"{UPDATER}.update_weights_from_ipc",),
    wrapper=on_ipc,
    contract=Contract(params=("recv_req",)),
    why="The checkpoint engine's hook runs post-processing on layers that are processed already.",
    how="Refuses by name.",
    **_COMMON,
)
