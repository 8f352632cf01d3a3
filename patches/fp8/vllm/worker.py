"""Record a worker's role, stop it from running a broken policy, report its policies to the engine core."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.policy import Policy

logger = logging.getLogger("flashpatch.fp8")

WORKER = "vllm.v1.worker.gpu_worker:Worker"


def on_load_model(original, self, *args: Any, **kwargs: Any):
    """Around ``Worker.load_model``: record the worker's role, and end the first load."""
    ledger.role("worker", rank=self.rank, local_rank=self.local_rank)
    if model_registry.report_failed_call not in all_ranks.on_failure:
        all_ranks.on_failure.append(model_registry.report_failed_call)
    with model_registry.owned_by(self.model_runner):
        result = original(self, *args, **kwargs)
    model_registry.end_first_loads(self.model_runner)
    return result


def on_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``Worker.execute_model``: stop a worker that is driven past the engine core's own refusal."""
    _refuse_unservable(self.model_runner, scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


def on_runner_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``GPUModelRunner.execute_model``, which some executors call past the worker."""
    _refuse_unservable(self, scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


def _refuse_unservable(runner: Any, scheduler_output: Any) -> None:
    """Raise if a step would compute on weights that are not one whole policy.

    A step without tokens only names the requests that have ended; it computes nothing.
    """
    if not scheduler_output.total_num_scheduled_tokens:
        return
    broken = model_registry.first_unservable(runner)
    if broken is not None:
        raise PatchError(
            f"the weights are not one whole policy: {broken.policy().why_refused()}",
            patch=STEP.id,
            advice="Send a complete update.",
        )


def report(worker: Any) -> list[Policy]:
    """Commit what is complete, then return the policy of each model; run on each worker by the engine core."""
    models = model_registry.all_models(worker.model_runner)
    for model in models:
        try:
            model.commit_if_complete()
        except Exception:
            logger.exception("an update could not be committed")  # the model's policy carries the error
    return [model.policy() for model in models]


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
    why="A model that holds layers of two policies must not produce a token, whoever drives the worker.",
    how="Checks one flag per model before each step.",
    remove_when="vLLM refuses steps while an update is open or has failed.",
)

_runner = partial(
    _patch,
    wrapper=on_runner_execute_model,
    contract=Contract(params=("scheduler_output",)),
    evidence="optional",  # an engine has one of the two model runners
    needs=("fp8.vllm.initialize_model",),
    why="Ray's executor up to vLLM 0.32 calls the model runner directly, past Worker.execute_model.",
    how="Checks one flag per model before each step.",
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
