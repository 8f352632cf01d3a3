"""Schedule nothing unless every rank holds the same whole policy.

A refusal must come before scheduling, because an exception inside a step ends the engine core. So before each
step the gate checks what the workers report; if they cannot generate, every request is finished with an error
that says why, and the engine keeps running for the update that repairs it.

`executor_door` notes every call that may have changed the workers, and stamps each step with the version that the gate
believes; a worker that holds another one refuses the step."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.tally import count
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.vllm import caches, running_requests, unsupported, worker
from flashpatch.patches.fp8.vllm.executor_door import ExecutorDoor
from flashpatch.patches.fp8.witness import Witness

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.events import Policy

logger = logging.getLogger("flashpatch.fp8")

STEP = "fp8.vllm.engine_core_step"
MARK = f"[flashpatch: {STEP}]"
_SAME_EVERYWHERE = (
    "FLASHPATCH must have the same value in the engine core and in every worker process; Ray workers get it by "
    "runtime_env or from the driver's environment."
)


class SchedulerGate:
    """Check one engine core's workers before it schedules.

    Args:
        core: the engine core, just constructed.

    Attributes:
        door: everything that reaches the workers passes here.
        turn: held during a step and during a call to the workers, which may come from another thread.
        version: version of the target's weights that the caches belong to.
        adapters: how often the name or number of a LoRA adapter has come to mean something else.
        holds: name and path of the adapter that each number stands for, see `Policy`; None where adapters are not followed.
        witness: vLLM's own checksums.
        prefix_key: of the prefix cache; None if commits empty it.
        drafter_version: version of the drafter's weights, 0 before its first update and without one.
        drafter_problem: why the drafter may not be used, empty if it may.
        weight_version: what was set as vLLM's ``weight_version``, None before the first update.
        answered: version of the policy of which the engine core last ended a step, -1 before the first."""

    def __init__(self, core: Any) -> None:
        self.version = self.drafter_version = self.adapters = 0
        self.drafter_problem, self._refusing = "", False
        self.holds: dict[int, tuple[str, str] | None] | None = None
        self.weight_version: str | None = None
        self.answered = -1
        self.prefix_key = caches.open_for(core)
        self.turn = threading.RLock()
        self.witness = Witness()
        self._by_call = (
            False  # whether a call has brought the version: what its caller names next is that one
        )
        self._stale = True  # workers may have changed since their last report
        self._seen_changes = 0  # last change_count() seen: models of this process can change without an RPC
        self._reported_busy = False
        self._pending_outputs: dict[int, Any] = {}  # outputs of requests that were aborted between two steps
        self.door = ExecutorDoor(core, self)

    def workers_changed(self) -> None:
        """Note that the workers may have changed since their last report."""
        self._stale = True

    def before_call(self, core: Any) -> None:
        """Prepare for a call to the workers that may carry an update: report to those elsewhere whether requests have begun."""
        self.workers_changed()
        running = self.door.runner is None and bool(running_requests.begun(core))
        if running != self._reported_busy:
            self.door.ask(running_requests.report, (running,))
            self._reported_busy = running

    def replacement_outputs(self, core: Any) -> dict[int, Any] | None:
        """Return the outputs of requests that were ended, in place of a step; None when the step may run."""
        stale = self._stale or model_registry.changed_since(self.door.models(), self._seen_changes)
        if core.scheduler.has_unfinished_requests() and stale:
            reason = self.check_workers(core, before_step=True)
            if reason is not None:
                return self._refuse(core, None, reason)
        if self.holds is not None and core.scheduler.has_unfinished_requests():
            refused, reason = running_requests.unmet(core, self)
            if refused:
                return self._refuse(core, refused, reason)
        if self.drafter_problem:
            for request in core.scheduler.running:
                request.spec_token_ids = []
        pending, self._pending_outputs = self._pending_outputs, {}
        return pending or None

    def keep_lock_step(self, core: Any) -> bool:
        """In place of a step: run an empty batch if other engines wait for this one in their forward; return whether it ran.

        Experts that span the engines of a data-parallel group meet in each forward, and the engines in a collective after it."""
        if not unsupported.spans_engines(core.vllm_config) or core.model_executor.is_sleeping:
            return False
        core.execute_dummy_batch()
        return True

    def check_followed(self) -> None:
        """Check that FlashPatch follows the weights of every rank.

        Raises:
            PatchError: names the ranks where it does not."""
        try:
            reports = self.door.ask(worker.report)
        except RuntimeError as error:  # FlashPatch cannot even be imported there
            raise _unfollowed(f"a worker cannot report: {error}") from error
        if unknown := _without_target(reports):
            raise _unfollowed(unknown)

    def check_workers(self, core: Any, before_step: bool = False) -> str | None:
        """Ask all workers for their policies, adopt a new version; return why nothing may be generated, or None.

        Each model is followed by itself. A rank may hold the target, the drafter, or both."""
        reports = self.door.ask(worker.report, (before_step, running_requests.numbers(core)))
        if unknown := _without_target(reports):
            return f"{unknown}. {_SAME_EVERYWHERE}"
        self._follow_drafter(*_agreed(reports, "drafter"))
        version, problem = _agreed(reports, "target")
        if problem:
            return f"{problem}. Send a complete update."
        adapters, problem = _agreed(reports, "lora")
        if problem:
            return f"{problem}. Send the adapter again."
        self.holds = next((one.holds for policies in reports for one in policies if one.role == "lora"), None)
        self._stale, self._seen_changes = False, model_registry.change_count(self.door.models())
        if self._refusing:
            self._refusing = False
            ledger.note(refusing="")
        if (version, adapters) == (self.version, self.adapters):
            return None
        try:
            with self.door.held_open():
                self._adopt(core, version, adapters, by_call=not before_step)
        except Exception as error:  # a KV connector's own, perhaps
            self._stale = True
            if isinstance(error, PatchError):  # with whose name a refusal begins
                return f"{error.problem}. {error.advice}"
            return f"what is cached of the old policy could not be reset: {type(error).__name__} {error}"
        return None

    def _follow_drafter(self, version: int, problem: str) -> None:
        """Adopt a drafter's version, or stop using its drafts: they decide how fast tokens come, never which."""
        if problem and not self.drafter_problem:
            logger.warning("speculation is off until the drafter gets a complete update: %s", problem)
        elif self.drafter_problem and not problem:
            logger.warning("speculation is on again")
        if (version, problem) != (self.drafter_version, self.drafter_problem):
            ledger.note(drafter_version=version, speculation="off" if problem else "on")
        self.drafter_version, self.drafter_problem = version, problem

    def _adopt(self, core: Any, version: int, adapters: int, by_call: bool) -> None:
        """Adopt a new policy version, or adapters under known names: part with what was cached before."""
        if engine.options("fp8")["in_flight"] == "abort":
            self._abort(core, running_requests.begun(core))
        elif adapters != self.adapters:
            running_requests.move(core, running_requests.begun(core), self.holds or {})
        caches.adopt(core, self.prefix_key)
        self.adapters = adapters
        if version == self.version:
            return
        self.version = version
        self._tell(core, version)
        self._by_call = by_call
        ledger.note(policy_version=version)
        ledger.event("adopted", version=version)

    def _tell(self, core: Any, version: int) -> None:
        """Give the version to vLLM as the engine's ``weight_version``, unless the caller named one. Before 0.27 vLLM has
        none: there it is FlashPatch's alone."""
        known = getattr(core, "get_weight_version", lambda: self.weight_version)()
        if not self._by_call and known not in (None, self.weight_version or "default"):
            self.weight_version = known
            return
        self.weight_version = f"flashpatch-{version}"
        if hasattr(core, "set_weight_version"):
            core.set_weight_version(self.weight_version)

    def label(self, core: Any, outputs: dict[int, Any] | None) -> None:
        """Give the outputs of a step the weight version that vLLM had when the step was handed to the workers.

        vLLM 0.32 and later give them the newest, as if it never changed while a step is in flight; it does with
        ``in_flight="keep"``. Its spans per token and FlashPatch's versions then name the same policy.

        Args:
            core: the engine core, after a call of its step function.
            outputs: of the step that has ended, by client; None if none has."""
        version = None
        while len(self.door.labels) > len(core.batch_queue or ()):
            version = self.door.labels.popleft()
        for one in (outputs or {}).values():
            if version is not None and hasattr(one, "weight_version"):
                one.weight_version = version

    def _refuse(self, core: Any, requests: list[str] | None, reason: str) -> dict[int, Any]:
        """End ``requests`` (None: all) with an error; return the outputs that say so."""
        if requests is None:
            self._refusing = True
            ledger.note(refusing=reason)  # before the event, with which the row is written
        ledger.event("refused", what="requests", problem=reason)
        count("requests_refused")
        return _finish(core, requests, "ERROR", f"{MARK} {reason}")

    def _abort(self, core: Any, requests: list[str]) -> None:
        """Abort ``requests`` and notify their clients: at once, or with the next step if there is no queue."""
        outputs = _finish(core, requests, "ABORT") if requests else {}
        queue = getattr(core, "output_queue", None)
        if queue is None:
            self._pending_outputs.update(outputs)
            return
        for item in outputs.items():
            queue.put_nowait(item)


def _unfollowed(problem: str) -> PatchError:
    return PatchError(problem, patch="fp8.vllm.engine_core_init", advice=_SAME_EVERYWHERE)


def _finish(core: Any, requests: list[str] | None, how: str, message: str | None = None) -> dict[int, Any]:
    """End ``requests`` (None: all) in state ``how``, "ERROR" or "ABORT"; return client index to outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    status = RequestStatus.FINISHED_ERROR if how == "ERROR" else RequestStatus.FINISHED_ABORTED
    outputs: dict[int, list] = defaultdict(list)
    for request in core.scheduler.finish_requests(requests, status):
        # before vLLM 0.26 a pair
        name, client = request if isinstance(request, tuple) else (request.request_id, request.client_index)
        outputs[client].append(
            EngineCoreOutput(
                request_id=name, new_token_ids=[], finish_reason=FinishReason[how], stop_reason=message
            )
        )
    return {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}


def _without_target(reports: list[list[Policy]]) -> str:
    """Return the ranks that know no target, as a sentence; empty if all do."""
    ranks = [str(rank) for rank, held in enumerate(reports) if all(one.role != "target" for one in held)]
    if not ranks:
        return ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
    return f"FlashPatch does not follow the weights of {which}, so an update there would go unnoticed"


def _agreed(reports: list[list[Policy]], role: str) -> tuple[int, str]:
    """Return the version that all ranks hold of one model, 0 if none has it, and why it may not be used."""
    held = [
        (rank, policy) for rank, policies in enumerate(reports) for policy in policies if policy.role == role
    ]
    serve = ("ready", "open") if engine.options("fp8")["atomic"] == "model" else ("ready",)
    broken = [
        f"rank {rank} cannot serve: {policy.why_refused()}"
        for rank, policy in held
        if policy.state not in serve
    ]
    versions = sorted({policy.version for _, policy in held})
    if broken:
        return max(versions), "; ".join(broken)
    if len(versions) > 1:
        return max(versions), f"ranks hold different versions of the {role}, {versions}"
    return max(versions, default=0), ""
