"""Record a worker's role, stop it from running a broken policy, report its policies to the engine core."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.vllm_lora import worker_manager
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.policy import Policy

logger = logging.getLogger("flashpatch.fp8")

_kept: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()  # by model runner

WORKER = "vllm.v1.worker.gpu_worker:Worker"


def on_load_model(original, self, *args: Any, **kwargs: Any):
    """Around ``Worker.load_model``: record the worker's role, and end the first load."""
    at = {"rank": self.rank, "local_rank": self.local_rank}
    if index := self.parallel_config.data_parallel_index:
        at["dp"] = index
    ledger.role("worker", **at)
    if model_registry.report_failed_call not in all_ranks.on_failure:
        all_ranks.on_failure.append(model_registry.report_failed_call)
    with model_registry.owned_by(self.model_runner):
        result = original(self, *args, **kwargs)
    model_registry.end_first_loads(self.model_runner)
    return result


def on_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``Worker.execute_model``: stop a worker that is driven past the engine core's own refusal."""
    with _one_whole_policy(self.model_runner, scheduler_output):
        return original(self, scheduler_output, *args, **kwargs)


def on_runner_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``GPUModelRunner.execute_model``, which some executors call past the worker."""
    with _one_whole_policy(self, scheduler_output):
        return original(self, scheduler_output, *args, **kwargs)


def stamp(scheduler_output: Any, version: int) -> None:
    """Let a step take along the version of the policy that its engine core believes its workers hold."""
    scheduler_output.flashpatch_version = version


@contextmanager
def _one_whole_policy(runner: Any, scheduler_output: Any) -> Iterator[None]:
    """Keep updates out of a step; raise if it would compute on weights other than the whole policy it was scheduled for.

    A step without tokens only names the requests that have ended; it computes nothing. One without a stamp is of an
    engine core that has no gate, and so knows of no update.
    """
    if not scheduler_output.total_num_scheduled_tokens:
        yield
        return
    with model_registry.in_use(runner):
        broken = model_registry.first_unservable(runner)
        if broken is not None:
            raise PatchError(
                f"the weights are not one whole policy: {broken.policy().why_refused()}",
                patch=STEP.id,
                advice="Send a complete update.",
            )
        believed, held = getattr(scheduler_output, "flashpatch_version", 0), model_registry.version(runner)
        if held != believed:
            raise PatchError(
                f"this rank holds version {held} of the policy, and the engine core schedules for version {believed}, "
                "with what it has cached of it",
                patch=STEP.id,
                advice="Update weights in a call of collective_rpc, not in a thread of the worker, with FlashPatch on in "
                "the engine core too.",
            )
        yield


def report(worker: Any, before_step: bool = False, named: Collection[int] = ()) -> list[Policy]:
    """Commit what is complete, then return the policy of each model and of LoRA adapters; run on each worker by the engine core.

    Args:
        worker: vLLM's.
        before_step: a step follows, so what has come is all that its sender means to be there.
        named: numbers of the adapters that requests name.
    """
    models = model_registry.all_models(worker.model_runner)
    for model in models:
        try:
            model.commit_if_complete(more=not before_step)
        except Exception:
            logger.exception("an update could not be committed")  # the model's policy carries the error
        if before_step:
            model.expect_begin(if_unclear=True)
    return [model.policy() for model in models] + worker_manager.report(worker.model_runner, named)


def discard(worker: Any, by: str) -> None:
    """Note that all parameters are about to be overwritten, and keep those that no update brings; run on each worker."""
    for model in model_registry.all_models(worker.model_runner):
        if model.adapter.role == "target":
            model.mark_discarded(by=by)
            kept = [(tensor, tensor.detach().clone()) for tensor in model.never_loaded()]
            _kept.setdefault(worker.model_runner, kept)


def restore_kept(worker: Any) -> None:
    """Write back what `discard` has kept; run on each worker."""
    for tensor, copy in _kept.pop(worker.model_runner, ()):
        tensor.data.copy_(copy)


def checksums(worker: Any) -> dict[str, str]:
    """Return the checksum of each model's live weights, by role; run on each worker.

    Raises:
        PatchError: no model of this worker is known to FlashPatch.
    """
    models = model_registry.all_models(worker.model_runner)
    if not models:
        raise PatchError(
            "the weights of this engine are not known to FlashPatch",
            patch=LOAD.id,
            advice="Enable fp8, int8 or bf16 before the engine is opened.",
        )
    return {model.adapter.role: model.checksum() for model in models}


_patch = partial(Patch, requires="vllm>=0.24", scope=frozenset({"worker"}))

LOAD = _patch(
    id="fp8.vllm.worker_load_model",
    targets=(f"{WORKER}.load_model",),
    wrapper=on_load_model,
    contract=Contract(mentions=("self.model_runner.load_model",)),
    evidence="install",
    why="A process must be known as a worker, with its rank, for its absence to be noticed.",
    how="Writes role and rank to the ledger and ends the first load of every model.",
    remove_when="never: this is the evidence itself.",
)

STEP = _patch(
    id="fp8.vllm.worker_execute_model",
    targets=(f"{WORKER}.execute_model",),
    wrapper=on_execute_model,
    contract=Contract(
        params=("scheduler_output",),
        exists=("vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",),
    ),
    evidence="step",
    needs=("fp8.vllm.initialize_model",),
    why="A model that holds layers of two policies must not produce a token, whoever drives the worker; nor one whose "
    "update the engine core has not noticed, since its prefix cache is of the policy before.",
    how="Checks one flag per model and compares versions before each step, and keeps updates out of it.",
    remove_when="vLLM refuses steps while an update is open or has failed.",
)

_runner = partial(
    _patch,
    wrapper=on_runner_execute_model,
    contract=Contract(params=("scheduler_output",)),
    evidence="optional",  # an engine has one of the two model runners
    needs=("fp8.vllm.initialize_model",),
    why="Ray's executor up to vLLM 0.32 calls the model runner directly, past Worker.execute_model.",
    how="The same check, before the model runner's step.",
    remove_when=STEP.remove_when,
)

RUNNER = _runner(
    id="fp8.vllm.model_runner_execute_model",
    evidence="step",
    one_of=("fp8.vllm.model_runner_v2_execute_model",),
    targets=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",),
)

RUNNER_V2 = _runner(
    id="fp8.vllm.model_runner_v2_execute_model",
    evidence="step",
    one_of=("fp8.vllm.model_runner_execute_model",),
    targets=("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",),
)
