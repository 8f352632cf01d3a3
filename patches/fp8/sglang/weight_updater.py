"""Return errors of a model runner's updates to the sender, instead of ending the scheduler."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.sglang import model, receipts
from flashpatch.patches.fp8.sglang.schedulers import REMOVE_WHEN
from flashpatch.patches.fp8.update import events

logger = logging.getLogger("flashpatch.fp8")

failures: list[str] = []
"""Errors since the last session began."""

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
# an engine is updated through one of these functions
_TENSOR, _DISTRIBUTED, _DISK, _IPC = (
    f"fp8.sglang.{way}"
    for way in (
        "update_weights_from_tensor",
        "load_weights_from_distributed",
        "runner_update_weights_from_disk",
        "update_weights_from_ipc",
    )
)

patches = Patches("fp8", "sglang>=0.5.21", scope="worker", evidence="update", remove_when=REMOVE_WHEN)


@patches.wrap(
    f"{UPDATER}.update_weights_from_tensor",
    relies_on="self.get_model",
    one_of=(_DISTRIBUTED, _IPC, _DISK),
    why="An exception in a loader ends the scheduler, and the scheduler's end that of its parent.",
)
def update_weights_from_tensor(original, self, named_tensors: Any, load_format: str | None = None):
    """Answer success=False with the reason. Refuse load formats that write past the model's load_weights."""
    if model_registry.get(self.get_model()) is None:
        return original(self, named_tensors, load_format)
    patch = patches.of(update_weights_from_tensor).id
    return load_bucket(named_tensors, load_format, patch, lambda: original(self, named_tensors, load_format))


def load_bucket(
    named_tensors: Any, load_format: str | None, patch: str, do: Callable[[], tuple[bool, str]]
) -> tuple[bool, str]:
    """Load one bucket by ``do``, timed and counted for the session's receipt; return its answer, or an error's.

    Args:
        named_tensors: see `receipts.SessionReceipt.loading`.
        load_format: as the sender says; formats that write past the model's ``load_weights`` are refused.
        patch: id of the patch that refuses.
        do: SGLang's own function."""

    def load() -> tuple[bool, str]:
        if load_format not in (None, "flattened_bucket"):
            raise PatchError(
                f"load_format={load_format!r} writes into processed weights, past the model's load_weights",
                patch=patch,
                advice="Leave load_format out, or use flattened_bucket.",
            )
        receipt = receipts.current()
        with receipt.loading(named_tensors) if receipt is not None else nullcontext():
            return do()

    return exception_as_answer(load)


@patches.wrap(
    f"{UPDATER}.load_weights_from_distributed",
    relies_on="self.get_model",
    one_of=(_IPC, _TENSOR, _DISK),
    why="SGLang's own answer says that weights are partially updated, whatever has happened.",
)
def load_weights_from_distributed(original, self, named_tensors: Any):
    """Answer with the outcome of the update."""
    if model_registry.get(self.get_model()) is None:
        return original(self, named_tensors)
    return exception_as_answer(lambda: original(self, named_tensors))


@patches.wrap(
    f"{UPDATER}.update_weights_from_disk",
    relies_on="self.model_config.model_path",
    params=("model_path", "load_format"),
    one_of=(_DISTRIBUTED, _IPC, _TENSOR),
    why="SGLang's rollback loads the new path again, and raises when that fails too.",
)
def runner_update_weights_from_disk(original, self, model_path: str, *args: Any, **kwargs: Any):
    """Stop the second attempt, put the path back and answer with the first error."""
    owner = model_registry.get(self.get_model())
    if owner is None:
        return original(self, model_path, *args, **kwargs)
    return load_from_disk(owner, self.model_config, lambda: original(self, model_path, *args, **kwargs))


def load_from_disk(owner: Any, config: Any, do: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Update one model from disk by ``do``, SGLang's own function; return its answer.

    After a failure SGLang "rolls back" by loading the same new path once more; stop that attempt, and
    restore the path that it has already set."""
    path = config.model_path
    with model.one_attempt(owner):
        done, message = exception_as_answer(do)
    events.note(owner)
    if not done:
        owner.abandon(message)
        config.model_path = path
        # asleep: an error of before says nothing of this call
        message = message if owner.asleep else owner.error or message
    return done, message


@patches.wrap(
    f"{UPDATER}.update_weights_from_ipc",
    one_of=(_DISTRIBUTED, _TENSOR, _DISK),
    why="The checkpoint engine's hook runs post-processing on layers that are processed already.",
)
def update_weights_from_ipc(original, self, recv_req: Any):
    """Refuse the checkpoint engine by name: it processes quantized layers itself."""
    if model_registry.get(self.get_model()) is None:
        return original(self, recv_req)
    return refuse_ipc(patches.of(update_weights_from_ipc).id)


def refuse_ipc(patch: str) -> tuple[bool, str]:
    """Return the answer to an update through the checkpoint engine."""
    problem = "update_weights_from_ipc processes quantized layers a second time"
    advice = "Use update_weights_from_tensor, _from_distributed or _from_disk."
    return False, str(PatchError(problem, patch=patch, advice=advice))


def exception_as_answer(update: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Return the answer of ``update``, or its exception as an answer."""
    try:
        return update()
    except Exception as error:
        logger.exception("a weight update failed")
        message = "".join((str(error), *(f" {note}" for note in getattr(error, "__notes__", ()))))
        if receipts.unfinished():  # the sender is a trainer, which shows what it is told
            message = "".join(traceback.format_exception(error)).rstrip()
        failures.append(message)
        return False, message
