"""Record a worker's role, stop it from running a broken policy, report its policy to the engine core."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.policy import Policy

logger = logging.getLogger("flashpatch.fp8")

WORKER = "vllm.v1.worker.gpu_worker:Worker"


def on_load_model(original, self, *args: Any, **kwargs: Any):
    """Around ``Worker.load_model``: record the worker's role, and end the first load."""
    ledger.role("worker", rank=self.rank, local_rank=self.local_rank)
    result = original(self, *args, **kwargs)
    model_registry.end_first_loads()
    return result


def on_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``Worker.execute_model``: stop a worker that is driven past the engine core's own refusal.

    A step without tokens only names the requests that have ended; it computes nothing.
    """
    broken = model_registry.first_unservable() if scheduler_output.total_num_scheduled_tokens else None
    if broken is not None:
        raise PatchError(
            f"the weights are not one whole policy: {broken.policy().why_refused()}",
            patch="fp8.vllm.worker_execute_model",
            advice="Send a complete update.",
        )
    return original(self, scheduler_output, *args, **kwargs)


def on_sleep(original, self, level: int = 1, *args: Any, **kwargs: Any):
    """Around ``Worker.sleep``: level 2 discards the weights."""
    result = original(self, level, *args, **kwargs)
    if level >= 2:
        for model in model_registry.all_models():
            model.mark_discarded()
    return result


def report(worker: Any) -> list[Policy]:
    """Commit what is complete, then return the policy of each model; run on each worker by the engine core."""
    for model in model_registry.all_models():
        if model.state == "open":
            try:
                model.commit_if_complete()
            except Exception:
                logger.exception("an update could not be committed")  # the model's policy carries the error
    return [model.policy() for model in model_registry.all_models()]


_patch = partial(Patch, requires="vllm>=0.28", scope=frozenset({"worker"}))

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

SLEEP = _patch(
    id="fp8.vllm.worker_sleep",
    targets=(f"{WORKER}.sleep",),
    wrapper=on_sleep,
    contract=Contract(params=("level",)),
    evidence="optional",
    needs=("fp8.vllm.initialize_model",),
    why="After sleep level 2 the weights' memory holds nothing; vLLM would generate from it.",
    how="Marks the policy as broken until a complete update.",
    remove_when="vLLM refuses to generate after sleep level 2 until weights are restored.",
)
