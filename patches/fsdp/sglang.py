"""Audit the weights that SGLang's schedulers receive: from the beginning of an update session to its end."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fsdp import fingerprints
from flashpatch.patches.fsdp.arrival import Arrival

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
UPDATERS = "sglang.srt.model_executor.model_runner_components.weight_updater"
TP_GROUP = (
    "sglang.srt.distributed.parallel_state:get_tp_group",
    "sglang.srt.distributed.parallel_state:GroupCoordinator.cpu_group",
)

patches = Patches(
    "fsdp",
    "sglang>=0.5.21",
    scope="worker",
    evidence="update",
    remove_when="verl checks what arrives against the trainer's shards.",
)


class Refused(RuntimeError):
    """Stop SGLang from committing an update; the text is the audit's."""


class Session:
    """Hold the audit of this process's open update session.

    Attributes:
        arrival: the audit; None outside sessions, and in those of a drafter alone.
        problem: why the session must not be committed; empty while nothing is known against it."""

    arrival: Arrival | None = None
    problem: str = ""


@patches.wrap(
    f"{MANAGER}.begin_weight_update",
    relies_on=(
        "self._session",
        "recv_req.selector",
        "self._select_runners",
        "sglang.srt.managers.io_struct:BeginWeightUpdateReqInput.selector",
        "sglang.srt.managers.io_struct:BeginWeightUpdateReqOutput",
    ),
    why="An audit covers the buckets of one sync, which SGLang's session delimits.",
)
def begin_weight_update(original, self, recv_req: Any) -> Any:
    """Start an audit with each session that updates the policy.

    verl's trainer names its sync in the request: such a session must bring fingerprints. One that stock could not load is
    answered with success=False."""
    ledger.role("worker")
    if not engine.enabled("fp8") and _packed(self, recv_req.selector):
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

        refused = PatchError(
            "SGLang has packed this engine's weights for AMX and cannot load others into them.",
            **patches.at(begin_weight_update),
            version=f"sglang {metadata.version('sglang')}",
            advice="Switch on bf16 (or fp8, int8) beside fsdp: FLASHPATCH=bf16,fsdp.",
        )
        return BeginWeightUpdateReqOutput(success=False, message=str(refused))
    output = original(self, recv_req)
    if output.success:
        forget()
        if recv_req.selector != "draft":
            open_audit(recv_req.rid or "", patches.at(update_weights_from_tensor))
    return output


def _packed(manager: Any, selector: str) -> bool:
    """Whether SGLang has packed weights for AMX: they have lost their loaders, and loading would end the scheduler."""
    models = [runner.model for _, runner in manager._select_runners(selector)]
    return any(getattr(one, "use_intel_amx_backend", False) for model in models for one in model.modules())


def open_audit(sync: str, at: dict[str, str]) -> None:
    """Audit the session that is open; one whose sender named its sync must bring fingerprints.

    Args:
        sync: the sender's name of it, or empty.
        at: of the patch that receives, see `Patches.at`."""
    forget()
    Session.arrival = Arrival(at, bool(sync))


def forget() -> None:
    """Drop the audit, if one is open."""
    if Session.arrival is not None:
        Session.arrival.close()
    Session.arrival, Session.problem = None, ""


@patches.wrap(
    f"{UPDATERS}:WeightUpdater.update_weights_from_tensor",
    relies_on=(
        "_unwrap_tensor",
        "self.get_model",
        f"{UPDATERS}:LocalSerializedTensor.get",
        f"{UPDATERS}:WeightUpdater.get_model_runner",
        *TP_GROUP,
    ),
    why="SGLang loads whatever arrives; with wrong weights the policy trains on another's text.",
)
def update_weights_from_tensor(
    original, self, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """Fingerprint each tensor as it arrives, whole, before it is quantized or loaded, and compare with the trainer's before
    the last bucket is loaded. What any rank finds is the answer success=False, which stops the trainer.

    An exception here would end the scheduler."""
    drafts = self.get_model_runner().is_draft_worker and Session.arrival is not None
    if drafts and load_format is None:  # gets the same bucket after the policy
        return original(self, [item for item in named_tensors if not fingerprints.ours(item[0])], load_format)
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

    return load_audited(
        named_tensors, load_format, LocalSerializedTensor, lambda kept: original(self, kept, load_format)
    )


def load_audited(
    named_tensors: Any, load_format: str | None, serialized: type, load: Callable[[Any], tuple[bool, str]]
) -> tuple[bool, str]:
    """Audit one bucket, then ``load`` it; return the answer.

    Args:
        named_tensors: names and tensors, with the audit's messages among them; a flattened bucket is not audited.
        load_format: None for named tensors.
        serialized: SGLang's class of a tensor that came once for each rank.
        load: SGLang's own function."""
    arrival = Session.arrival
    if arrival is None or (load_format is not None and not arrival.expected):
        return load(named_tensors)
    if load_format is not None:
        return False, str(
            PatchError(
                f"load_format={load_format!r} cannot be audited.",
                **arrival.at,
                advice="Send named tensors (checkpoint_engine.backend=naive), or set the audit to off.",
            )
        )
    kept, problem = _audited(arrival, named_tensors, serialized)
    try:
        problem = of_all_ranks(problem)
        if problem:
            return False, problem
        return load(kept) if kept else (True, "Success")
    finally:
        arrival.finish_bucket()


def _audited(arrival: Arrival, named_tensors: Any, serialized: type) -> tuple[list[tuple[str, Any]], str]:
    """Return what is to be loaded, and why it must not be; the latter is empty if nothing is wrong."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    try:
        rank = get_tp_group().rank_in_group
        return arrival.receive(
            (name, tensor.get(rank) if isinstance(tensor, serialized) else tensor)
            for name, tensor in named_tensors
        ), ""
    except PatchError as error:
        return [], str(error)
    except Exception as error:
        return [], f"[flashpatch: {arrival.at['patch']}] {type(error).__name__}: {error}"


def of_all_ranks(problem: str) -> str:
    """Return what the first tensor-parallel rank with a problem says; empty if none has one.

    SGLang returns the first rank's answer alone. Every rank must call this."""
    import torch
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return problem
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, problem, group=group.cpu_group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")


@patches.wrap(
    f"{UPDATERS}:WeightUpdater.end_weight_update",
    relies_on="DefaultModelLoader.postprocess_weights",
    id="fsdp.sglang.runner_end_weight_update",
    why="At the end of a session SGLang commits whatever has arrived, however little.",
)
def runner_end_weight_update(original, self, *args: Any, **kwargs: Any) -> Any:
    """Raise before the commit when the audit failed on any rank; fsdp.sglang.end_weight_update answers.

    Raises:
        Refused: the audit of this session failed on this rank or another."""
    if Session.problem:
        raise Refused(Session.problem)
    return original(self, *args, **kwargs)


@patches.wrap(
    f"{MANAGER}.end_weight_update",
    relies_on=(
        "self._session",
        "runner.weight_updater.end_weight_update",
        "sglang.srt.managers.io_struct:EndWeightUpdateReqOutput",
    ),
    why="A sync that ends without its fingerprints would be committed.",
)
def end_weight_update(original, self, recv_req: Any) -> Any:
    """End the audit before the commit; what any rank found is the answer success=False on all of them."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    if self._session is None:
        return original(self, recv_req)
    Session.problem = problem = of_all_ranks(problem_found())
    try:
        output = original(self, recv_req)
    except Refused as refused:
        self._session = None
        output = EndWeightUpdateReqOutput(success=False, message=str(refused))
    if self._session is None:  # else requests are running, and the end is to be asked for again
        forget()
        ledger.flush()  # SGLang ends its processes by SIGKILL
        if problem and problem not in output.message:
            output = EndWeightUpdateReqOutput(success=False, message=problem)
    return output


def problem_found() -> str:
    """Return why the audit of this rank failed, or an empty string."""
    try:
        if Session.arrival is not None:
            Session.arrival.finish()
    except PatchError as error:
        return str(error)
    return ""
