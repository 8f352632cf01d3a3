"""Record a worker's role, stop it from running a broken policy, report its policies to the engine core, follow its sleep.

At sleep level 2 vLLM gives the memory of weights back. Registered buffers it saves itself, and parameters that
``sleep_preserve_parameter_names`` names. Tensors that a module holds as plain attributes, parameters that no checkpoint
brings, and a drafter it does not save, and no update of the policy restores them: they are copied to the host."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches.fp8 import model_registry, named_update, stated
from flashpatch.patches.fp8.vllm_lora import worker_manager

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.events import Policy
    from flashpatch.patches.fp8.update.tensors import HostCopies

logger = logging.getLogger("flashpatch.fp8")

_kept: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()  # by model runner
_saved: weakref.WeakKeyDictionary[Any, HostCopies] = weakref.WeakKeyDictionary()  # by model runner
_checked: set[tuple[int, int]] = set()  # model runner and scheduled step, by identity, of those that run now

WORKER = "vllm.v1.worker.gpu_worker:Worker"

patches = Patches("fp8", "vllm>=0.24", scope="worker")


@patches.wrap(
    f"{WORKER}.load_model",
    relies_on="self.model_runner.load_model",
    evidence="install",
    why="A process must be known as a worker, with its rank, for its absence to be noticed.",
    remove_when="never: this is the evidence itself.",
)
def worker_load_model(original, self, *args: Any, **kwargs: Any):
    """Write the worker's role and rank to the ledger, and end the first load of every model."""
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


@patches.wrap(
    f"{WORKER}.execute_model",
    relies_on="vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
    why="A model that holds layers of two policies must not produce a token, whoever drives the worker; nor one whose "
    "update the engine core has not noticed, since its prefix cache is of the policy before.",
    remove_when="vLLM refuses steps while an update is open or has failed.",
)
def worker_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Check one flag per model and compare versions before each step, and keep updates out of it."""
    return _on_one_whole_policy(self.model_runner, original, self, scheduler_output, *args, **kwargs)


_runners = Patches(
    "fp8",
    "vllm>=0.24",
    scope="worker",
    why="Ray's executor up to vLLM 0.32 calls the model runner directly, past Worker.execute_model.",
    remove_when="vLLM refuses steps while an update is open or has failed.",
)


@_runners.wrap(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    id="fp8.vllm.model_runner_v2_execute_model",
    one_of="fp8.vllm.model_runner_execute_model",
)
@_runners.wrap(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    one_of="fp8.vllm.model_runner_v2_execute_model",
)
def model_runner_execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Make the same check before the model runner's step, unless its worker has just made it."""
    return _on_one_whole_policy(self, original, self, scheduler_output, *args, **kwargs)


def _on_one_whole_policy(runner: Any, original, self, step: Any, *args: Any, **kwargs: Any):
    """Keep updates out of a step; raise if it would compute on weights other than the whole policy it was scheduled for.

    A step without tokens only names the requests that have ended; it computes nothing. One without a stamp is of an
    engine core that has no gate, and so knows of no update."""
    running = id(runner), id(step)
    if not step.total_num_scheduled_tokens or running in _checked:
        return original(self, step, *args, **kwargs)
    models = model_registry.all_models(runner)
    with model_registry.in_use(models):
        broken = model_registry.first_unservable(models)
        if broken is not None:
            raise PatchError(
                f"the weights are not one whole policy: {broken.policy().why_refused()}",
                patch=patches.of(worker_execute_model).id,
                advice="Send a complete update.",
            )
        believed, held = getattr(step, "flashpatch_version", 0), model_registry.version(models)
        if held != believed:
            raise PatchError(
                f"this rank holds version {held} of the policy, and the engine core schedules for version {believed}, "
                "with what it has cached of it",
                patch=patches.of(worker_execute_model).id,
                advice="Update weights in a call of collective_rpc, not in a thread of the worker, with FlashPatch on in "
                "the engine core too.",
            )
        _checked.add(running)
        try:
            return original(self, step, *args, **kwargs)
        finally:
            _checked.discard(running)


def report(worker: Any, before_step: bool = False, named: Collection[int] = ()) -> list[Policy]:
    """Commit what is complete, then return the policy of each model and of LoRA adapters; run on each worker by the engine core.

    Args:
        worker: vLLM's.
        before_step: a step follows, so what has come is all that its sender means to be there.
        named: numbers of the adapters that requests name."""
    models = model_registry.all_models(worker.model_runner)
    for model in models:
        try:
            model.before_request() if before_step else model.after_call()
        except Exception:
            logger.exception("an update could not be committed")  # the model's policy carries the error
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
        PatchError: no model of this worker is known to FlashPatch."""
    return {model.adapter.role: model.checksum() for model in _known(worker)}


def state_update(worker: Any, what: str, sender: str) -> None:
    """Begin, finish or abandon an update by name, that of this ``sender`` alone; run on each worker.

    Raises:
        PatchError: it cannot begin, or is not one whole policy; or no model of this worker is known to FlashPatch."""
    models = _known(worker)
    if what == named_update.BEGIN:
        stated.begin(models, sender)
    elif what == named_update.FINISH:
        stated.finish(models, sender)
    else:
        stated.abandon(models, "its sender failed", sender)


def _known(worker: Any) -> list[model_registry.ManagedModel]:
    models = model_registry.all_models(worker.model_runner)
    if not models:
        raise PatchError(
            "the weights of this engine are not known to FlashPatch",
            patch=patches.of(worker_load_model).id,
            advice="Enable fp8, int8 or bf16 before the engine is opened.",
        )
    return models


_AWAKE = "vLLM refuses to generate after sleep level 2 until weights are restored, and restores the rest."


@patches.wrap(
    f"{WORKER}.sleep",
    evidence="optional",
    remove_when=_AWAKE,
    why="After sleep level 2 the weights' memory holds nothing; vLLM would generate from it, and with a drafter "
    "that nobody sends again.",
)
def worker_sleep(original, self, level: int = 1, *args: Any, **kwargs: Any):
    """Mark the policy as broken until a complete update, if level 2 discards the weights; copy the drafter, parameters
    that no checkpoint brings, and what modules hold beside parameters, to the host."""
    models = model_registry.all_models(self.model_runner)
    slept, saved = [model for model in models if model.asleep], self.model_runner in _saved
    for model in models:
        model.asleep = True
    try:
        if level >= 2 and not saved:  # else asleep already, with nothing to copy
            _saved[self.model_runner] = _copy_to_host(models)
        result = original(self, level, *args, **kwargs)
    except BaseException:  # such as no memory on the host: it is awake
        for model in models:
            model.asleep = model in slept
        if not saved:
            _saved.pop(self.model_runner, None)
        raise
    if level < 2:
        return result
    preserved = frozenset(getattr(self, "_sleep_saved_parameters", ()))
    for model in models:
        if model.adapter.role == "target":
            model.mark_discarded(preserved)
    return result


@patches.wrap(
    f"{WORKER}.wake_up",
    evidence="optional",
    remove_when=_AWAKE,
    when="anywhere=fp8.vllm.worker_sleep anywhere=fp8.vllm.engine_core_wake_up",
    why="What was copied to the host before sleep level 2 must be in place before an update reads it.",
)
def worker_wake_up(original, self, tags: list[str] | None = None, *args: Any, **kwargs: Any):
    """Copy back what was kept on the host, once the memory of weights is there again."""
    result = original(self, tags, *args, **kwargs)
    if tags is None or "weights" in tags:
        if (saved := _saved.pop(self.model_runner, None)) is not None:
            saved.restore()
            worker_manager.write_again(self.model_runner)
        for model in model_registry.all_models(self.model_runner):
            model.asleep = False
    return result


def _copy_to_host(models: list[model_registry.ManagedModel]) -> HostCopies:
    from flashpatch.patches.fp8.update.tensors import HostCopies

    targets = [model for model in models if model.adapter.role == "target"]
    kept = [tensor for model in targets for tensor in (*model.never_loaded(), *model.constants())]
    kept += [tensor for model in models if model not in targets for tensor in model.tensors()]
    return HostCopies(kept, without=[tensor for model in targets for tensor in model.brought()])
