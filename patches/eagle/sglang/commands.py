"""Answer the family's calls in SGLang's schedulers, through its request for the internal state.

The call is `request`; SGLang brings it to every tensor-parallel rank, between two batches. An open update session, such as
the policy's, excludes new drafter weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.drafter_refit import checkpoint, embeddings_and_head
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE
from flashpatch.patches.eagle.drafter_refit.versions import Weights
from flashpatch.patches.eagle.options import SGLANG, UNTIL_SGLANG
from flashpatch.patches.eagle.sglang import capture, drafter_refit

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("flashpatch.eagle")

ID = "eagle.sglang.get_internal_state"
MARK = "flashpatch eagle: "
"""Start of the request's id; the call follows as JSON, [method, arguments]."""
ANSWERS = "flashpatch_eagle"
"""Key of the answer: per rank {"answer": ...} or {"error": text}."""


def request(method: str, arguments: tuple) -> Any:
    """Return SGLang's request that makes a call; its answer goes to `answers`."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    return GetInternalStateReq(rid=MARK + json.dumps([method, list(arguments)]))


def answers(state: dict[str, Any], method: str) -> list[Any]:
    """Return each rank's answer to a call. Raises PatchError if a rank refused it, or the schedulers carry no
    FlashPatch."""
    if ANSWERS not in state:
        raise PatchError(
            f"SGLang's schedulers do not know {method}.",
            patch=ID,
            advice="Check with flashpatch-verify --live that FLASHPATCH has eagle in their processes.",
        )
    found = state[ANSWERS]
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if "error" in one]
    if errors:
        raise PatchError(
            f"{method} failed: {'; '.join(errors)}", patch=ID, advice="The server's log has the traceback."
        )
    return [one["answer"] for one in found]


@Patches("eagle", SGLANG, scope="worker", remove_when=UNTIL_SGLANG).wrap(
    f"{drafter_refit.SCHEDULER}.get_internal_state",
    relies_on=(
        "sglang.srt.managers.io_struct:GetInternalStateReq.rid",
        "sglang.srt.managers.io_struct:GetInternalStateReqOutput.internal_state",
        "sglang.srt.distributed:tensor_model_parallel_all_gather",
    ),
    evidence="optional",
    why="A server's schedulers have no call that takes a file's name and returns an answer of every rank.",
)
def get_internal_state(original, self, recv_req: Any):
    """Answer a request for the internal state whose id names a call: where samples are, what is accepted, new drafter
    weights, and the target's embeddings and head."""
    if not (recv_req.rid or "").startswith(MARK):
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    method, arguments = json.loads(recv_req.rid[len(MARK) :])
    manager = self.weight_updater
    try:
        one = {"answer": _METHODS[method](manager, *arguments)}
    except Exception as error:
        logger.exception("%s failed", method)
        one = {"error": f"{type(error).__name__}: {error}"}
    return GetInternalStateReqOutput(internal_state={ANSWERS: _gather(manager, one)})


def update_drafter(manager: Any, path: str, version: int) -> dict[str, Any]:
    """Load drafter weights from a safetensors file, or a directory of them, that every rank can read; return ``version``
    and the number of ``tensors``. Raises PatchError if a rank cannot take them; nothing has changed then.

    ``manager``, here and below, is SGLang's ``SchedulerWeightUpdaterManager``."""
    tensors = _agree(manager, path)
    drafter_refit.refit_of(manager).load(tensors, Weights(version, str(path)))
    manager.flush_cache()  # cached prefixes hold the old drafter's keys and values
    ledger.note(eagle_drafter_loaded={"version": version, "path": str(path), "tensors": len(tensors)})
    return {"version": version, "tensors": len(tensors)}


def _agree(manager: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter, once every rank can take them."""
    problem, tensors = "", {}
    try:
        tensors = _read(manager, Path(path))
    except PatchError as error:
        problem = str(error)
    problems = [one for one in _gather(manager, problem) if one]
    if problems:
        raise checkpoint.problem(ID, f"no drafter was loaded: {problems[0]}", "The old one stays in use")
    return tensors


def _read(manager: Any, path: Path) -> dict[str, torch.Tensor]:
    """Read and check an update. Raises `PatchError` if no model drafts here, another session is open or requests run."""
    refit = drafter_refit.refit_of(manager)
    if refit is None:
        what = "this engine has no drafter with weights"
        raise checkpoint.problem(ID, what, "Open it with an EAGLE drafter.")
    if (session := getattr(manager, "_session", None)) is not None:
        what = f'an update session with selector="{session.selector}" is open'
        raise checkpoint.problem(ID, what, "Send the drafter after the policy's update has ended.")
    if not manager.is_fully_idle():
        raise checkpoint.problem(ID, "requests are running", "Send the drafter between two rollouts.")
    return checkpoint.load(path, Path(refit.own), refit.shared(), ID)


def flush(manager: Any, reads: bool = True) -> dict[str, Any]:
    """Wait until the captured states of finished requests are stored; return counts, and ``queue``, the directory of
    the samples, which the caller ``reads``, unless this rank captures nothing; ``drafter`` (version), ``drafter_path`` and ``acceptance`` (tokens
    per step) if a model of its own drafts."""
    from sglang.srt.runtime_context import get_parallel

    refit = drafter_refit.refit_of(manager)
    if refit is None:
        return {}
    recorder = capture.recorder_of(manager.draft_worker)
    if reads and recorder is None and get_parallel().tp_rank == 0:
        capture.say_off(manager.draft_worker.speculative_algorithm.name)
    return {**(recorder.stored(reads) if recorder is not None else {}), **refit.state()}


def save_embeddings(manager: Any, folder: str) -> int:
    """Write the target's token embeddings and head to ``folder/model.safetensors``; return tensors written. Raises
    PatchError if the target has no plain embeddings."""
    from sglang.srt.distributed import tensor_model_parallel_all_gather
    from sglang.srt.runtime_context import get_parallel

    return embeddings_and_head.save_embeddings_and_head(
        manager.tp_worker.model_runner.model,
        Path(folder),
        lambda weight: tensor_model_parallel_all_gather(weight, dim=0),
        get_parallel().tp_rank == 0,
        ID,
    )


_METHODS = {UPDATE: update_drafter, FLUSH: flush, SAVE_EMBEDDINGS: save_embeddings}


def _gather(manager: Any, one: Any) -> list[Any]:
    """Return ``one`` of every tensor-parallel rank; all of them call this."""
    import torch

    found = [None] * torch.distributed.get_world_size(manager.tp_cpu_group)
    torch.distributed.all_gather_object(found, one, group=manager.tp_cpu_group)
    return found
