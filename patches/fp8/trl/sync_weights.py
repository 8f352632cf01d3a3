"""End TRL's weight sync with a commit: the colocated engine holds one new policy, or the sync raises."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.mismatch.monitor import MONITOR
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.rollout_numbers import NUMBERS
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

STEP: ContextVar[int | None] = ContextVar("step", default=None)
"""The step of the trainer that generates now, if that is known."""


def on_sync_weights(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``VLLMGeneration.sync_weights``: commit, compare versions, record what it took."""
    models = _models(self)
    before = [model.version for model in models]
    for model in models:
        model.expect_begin()
    began = time.perf_counter()
    result = original(self, *args, **kwargs)
    for model in models:
        model.commit_if_complete()
    _check(models, before)
    _record(models, time.perf_counter() - began)
    return result


def _models(generation: Any) -> list[ManagedModel]:
    """Return the policies of the engine in this process; none if TRL sends to a server."""
    if generation.mode != "colocate":
        return []
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    return [model for model in model_registry.all_models(runner) if model.adapter.role == "target"]


def _check(models: list[ManagedModel], before: list[int]) -> None:
    """Raise unless each model took what was sent as exactly one new version."""
    for model, version in zip(models, before, strict=True):
        policy = model.policy()
        if policy.state != "ready":
            problem = f"the weights that TRL sent are not one whole policy: {policy.why_refused()}"
        elif policy.version != version + 1:
            problem = (
                f"TRL's sync took the policy from version {version} to {policy.version}, not to the next one"
            )
        else:
            continue
        ledger.event("error", what="weight sync", step=STEP.get(), problem=problem)
        raise PatchError(
            problem,
            patch=PATCH.id,
            advice="The trainer's parameters and the engine's model must be of one kind.",
        )


def _record(models: list[ManagedModel], seconds: float) -> None:
    """Keep the sync's numbers for the log and the ledger."""
    for model in models:
        MONITOR.updated(model.rounding_errors)
    numbers = {"timing_s/sync/total": seconds}
    if models:
        numbers["sync/policy_version"] = float(max(model.version for model in models))
    step = STEP.get()
    NUMBERS.add(numbers)
    ledger.role("trainer")
    ledger.note(sync_step=step, sync={name: round(value, 4) for name, value in numbers.items()})
    ledger.event("sync", step=step, **{name: round(value, 6) for name, value in numbers.items()})


PATCH = Patch(
    id="fp8.trl.sync_weights",
    targets=("trl.generation.vllm_generation:VLLMGeneration.sync_weights",),
    requires="trl>=1.16",
    wrapper=on_sync_weights,
    contract=Contract(
        mentions=(
            "self.mode",
            "self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights",
            "self.llm.reset_prefix_cache",
        ),
        exists=("trl.generation.vllm_generation:VLLMGeneration._iter_named_params",),
    ),
    evidence="update",
    when="called=fp8.trl.generate_and_score_completions",
    scope=frozenset({"trainer"}),
    needs=("fp8.vllm.initialize_model",),
    why="TRL calls load_weights once per parameter and never says that it is done, so a sync that left a parameter out "
    "returns, and the next batch is what fails.",
    how="Commits when the sync ends, and raises with the names of what did not come; times the sync.",
    upstream="huggingface/trl#7085 takes a colocated fp8 engine through vLLM's reload, open; #3399.",
    remove_when="TRL's colocated sync begins and ends an update of vLLM's.",
)
