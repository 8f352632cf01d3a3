"""Schedule in an engine core only what a gate lets through: every rank holds the same whole policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from flashpatch import api, engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry, named_update
from flashpatch.patches.fp8.vllm import caches, client, executor_door, running_requests, worker
from flashpatch.patches.fp8.vllm.caches import CORE
from flashpatch.patches.fp8.vllm.scheduler_gate import SchedulerGate

gates: weakref.WeakKeyDictionary[Any, SchedulerGate] = weakref.WeakKeyDictionary()
_UNTOLD = (
    "Sleep level 2 discards weights in the workers; an engine core that is not told would schedule on them, and the worker's "
    "own refusal would end it."
)

patches = Patches(
    "fp8",
    "vllm>=0.24",
    scope="engine-core",
    remove_when="vLLM refuses to schedule while an update is open or has failed, and resets its caches at commit.",
)


@patches.register(
    f"{CORE}.__init__",
    relies_on=(
        "self.scheduler",
        "self.model_executor",
        "self.batch_queue",
        f"{CORE}.shutdown",
        "vllm.v1.executor.abstract:Executor.collective_rpc",
        "vllm.v1.executor.abstract:Executor.execute_model",
        "vllm.v1.serial_utils:run_method",
    ),
    since={"0.27": (f"{CORE}.set_weight_version", f"{CORE}.get_weight_version")},
    params=("vllm_config", "executor_class"),
    evidence="install",
    why="The scheduler must know which policy its workers hold.",
)
def engine_core_init(site: Site) -> Callable[[], None]:
    """Attach a gate to each engine core and to its executor, through which every call reaches the workers; refuse an
    engine of which a rank is not followed."""
    site.wrap(_init)

    def take_away() -> None:
        for core, gate in list(gates.items()):
            gate.door.remove()
            client.lost(core)
        gates.clear()
        caches.keys.clear()
        site.unwrap()

    return take_away


def _init(original, self, *args: Any, **kwargs: Any):
    engine.require("fp8")
    ledger.role("engine-core")
    original(self, *args, **kwargs)
    gate = SchedulerGate(self)
    try:
        gate.check_followed()
    except PatchError:
        self.shutdown()
        raise
    gates[self] = gate
    running_requests.track(self)


@patches.wrap(
    f"{CORE}.step_with_batch_queue",
    relies_on=("self.scheduler.schedule", "self.scheduler.has_requests"),
    id="fp8.vllm.step_with_batch_queue",
    how="Make the same check before the other step function.",
    why="The same as fp8.vllm.engine_core_step, for asynchronous scheduling and pipeline parallelism.",
    one_of="fp8.vllm.engine_core_step",
)
@patches.wrap(
    f"{CORE}.step",
    relies_on=(
        "self.scheduler.schedule",
        "self.scheduler.has_requests",
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
        "vllm.v1.engine:EngineCoreOutput.stop_reason",
        "vllm.v1.engine:FinishReason.ERROR",
        "vllm.v1.engine:FinishReason.ABORT",
        "vllm.v1.request:RequestStatus.FINISHED_ERROR",
        "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
    ),
    since={"0.32": ("vllm.v1.engine:EngineCoreOutputs.weight_version",)},
    why="An engine that schedules on half-updated weights serves a policy that never existed; stale prefix "
    "caches mix two.",
    one_of="fp8.vllm.step_with_batch_queue",  # an engine uses one of the two step functions
)
def engine_core_step(original, self):
    """Ask the workers after every call that may have changed weights; adopt a committed version, refuse everything else."""
    gate = gates.get(self)
    if gate is None:
        return original(self)
    with gate.turn, model_registry.in_use(gate.door.models()):
        outputs = gate.replacement_outputs(self)
        if outputs is None:
            result = original(self)
            gate.label(self, result[0])
            if (
                result[0] and gate.answered != gate.version
            ):  # a step ended: reports expect some of the workers too
                gate.answered = gate.version
                ledger.note(steps=1, answered=gate.version)
            return result
        return outputs, gate.keep_lock_step(self)


@patches.wrap(
    f"{CORE}.collective_rpc",
    relies_on="self.model_executor",
    evidence="optional",
    when="anywhere=fp8.verl_vllm.collective_rpc",
    why="Updates reach workers as calls through the engine core, which must notice the outcome.",
)
def collective_rpc(original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None):
    """Check the workers' policy after each call; an engine that was opened before FlashPatch was on takes none that may
    write weights."""
    gate = gates.get(self)
    if gate is None:
        client.check_late(method)
        return original(self, method, timeout, args, kwargs)
    if method == api.CHECKSUM:
        return original(self, worker.checksums, timeout)
    with gate.turn:
        how = worker.state_update if method == named_update.CALL else method
        result = original(self, how, timeout, args, kwargs)
        problem = gate.check_workers(self)
        if method == "compute_weight_checksums" and problem is None:
            gate.witness.heard(gate.version, patches.of(collective_rpc).id, result)
    return result


@patches.wrap(
    f"{CORE}.sleep",
    when="anywhere=fp8.vllm.worker_sleep",
    relies_on="self.model_executor",
    evidence="optional",
    why=_UNTOLD,
)
def engine_core_sleep(original, self, *args: Any, **kwargs: Any):
    """Refuse level 2 if experts span engines, as updates are refused there, before the scheduler is paused and requests
    end; ask the workers for their policy before the next step."""
    if self in gates:
        executor_door.refuse(self.vllm_config, "sleep", args, kwargs)
    return engine_core_wake_up(original, self, *args, **kwargs)


@patches.wrap(
    f"{CORE}.wake_up",
    when="anywhere=fp8.vllm.worker_wake_up",
    relies_on="self.model_executor",
    evidence="optional",
    why=_UNTOLD,
)
def engine_core_wake_up(original, self, *args: Any, **kwargs: Any):
    """Ask the workers for their policy before the next step: vLLM reaches them past collective_rpc here."""
    gate = gates.get(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        if gate is not None:
            gate.workers_changed()
