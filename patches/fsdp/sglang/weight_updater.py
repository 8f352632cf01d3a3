"""Audit each bucket that a scheduler is about to load, and refuse the commit of a failed audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.fsdp import messages
from flashpatch.patches.fsdp.arrival import Arrival
from flashpatch.record import Contract, Patch

MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
UPDATER = f"{MODULE}:WeightUpdater"
ID = "fsdp.sglang.update_weights_from_tensor"
TARGET = f"{UPDATER}.update_weights_from_tensor"


class Refused(RuntimeError):
    """Stop SGLang from committing an update; the text is the audit's."""


class Session:
    """Hold the audit of this process's open update session.

    Attributes:
        arrival: the audit; None outside sessions, and in those of a drafter alone.
        problem: why the session must not be committed; empty while nothing is known against it.
    """

    arrival: Arrival | None = None
    problem: str = ""


def on_tensor(original, self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
    """Around ``update_weights_from_tensor``: take the messages out and audit the rest before it is loaded.

    Whatever the audit raises becomes SGLang's answer: an exception here would end the scheduler.
    """
    drafts = self.get_model_runner().is_draft_worker and Session.arrival is not None
    if drafts and load_format is None:  # gets the same bucket after the policy
        return original(self, [item for item in named_tensors if not messages.ours(item[0])], load_format)
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

    return load_audited(
        named_tensors, load_format, LocalSerializedTensor, lambda kept: original(self, kept, load_format)
    )


def load_audited(
    named_tensors: Any,
    load_format: str | None,
    serialized: type,
    load: Callable[[Any], tuple[bool, str]],
) -> tuple[bool, str]:
    """Audit one bucket, then ``load`` it; return the answer.

    Args:
        named_tensors: names and tensors, with the audit's messages among them; a flattened bucket is not audited.
        load_format: None for named tensors.
        serialized: SGLang's class of a tensor that came once for each rank.
        load: SGLang's own function.
    """
    arrival = Session.arrival
    if arrival is None or (load_format is not None and not arrival.expected):
        return load(named_tensors)
    if load_format is not None:
        return False, str(
            PatchError(
                f"load_format={load_format!r} cannot be audited.",
                patch=arrival.patch_id,
                target=arrival.target,
                advice="Send named tensors (checkpoint_engine.backend=naive), or set the audit to off.",
            )
        )
    kept, problem = _audited(arrival, unwrapped(named_tensors, serialized))
    try:
        problem = of_all_ranks(problem)
        if problem:
            return False, problem
        return load(kept) if kept else (True, "Success")
    finally:
        arrival.settles()


def on_end(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``end_weight_update``, which commits.

    Raises:
        Refused: the audit of this session failed on this rank or another; see `update_session.on_end`.
    """
    if Session.problem:
        raise Refused(Session.problem)
    return original(self, *args, **kwargs)


def unwrapped(named_tensors: Any, serialized: type) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors, those for this rank if a tensor came serialized for each."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    rank = get_tp_group().rank_in_group
    for name, tensor in named_tensors:
        yield name, tensor.get(rank) if isinstance(tensor, serialized) else tensor


def of_all_ranks(problem: str) -> str:
    """Return what the first tensor-parallel rank with a problem says; empty if none has one.

    SGLang returns the first rank's answer alone. Every rank must call this.
    """
    import torch
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return problem
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, problem, group=group.cpu_group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")


def _audited(arrival: Arrival, items: Iterator[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], str]:
    """Return what is to be loaded, and why it must not be; the latter is empty if nothing is wrong."""
    try:
        return arrival.takes(items), ""
    except PatchError as error:
        return [], str(error)
    except Exception as error:
        return [], f"[flashpatch: {arrival.patch_id}] {type(error).__name__}: {error}"


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    evidence="update",
    scope=frozenset({"worker"}),
    remove_when="verl checks what arrives against the trainer's shards.",
)

TENSOR = _patch(
    id=ID,
    targets=(TARGET,),
    wrapper=on_tensor,
    contract=Contract(
        params=("named_tensors", "load_format"),
        mentions=("_unwrap_tensor", "self.get_model"),
        exists=(
            f"{MODULE}:LocalSerializedTensor.get",
            f"{UPDATER}.get_model_runner",
            "sglang.srt.distributed.parallel_state:get_tp_group",
            "sglang.srt.distributed.parallel_state:GroupCoordinator.cpu_group",
        ),
    ),
    why="SGLang loads whatever arrives; with wrong weights the policy trains on another's text.",
    how="Fingerprints each tensor as it arrives, whole, before it is quantized or loaded, and compares with "
    "the trainer's before the last bucket is loaded. What any rank finds is the answer success=False, which "
    "stops the trainer.",
)

END = _patch(
    id="fsdp.sglang.runner_end_weight_update",
    targets=(f"{UPDATER}.end_weight_update",),
    wrapper=on_end,
    contract=Contract(mentions=("DefaultModelLoader.postprocess_weights",)),
    why="At the end of a session SGLang commits whatever has arrived, however little.",
    how="Raises before the commit when the audit failed on any rank; fsdp.sglang.end_weight_update answers.",
)
