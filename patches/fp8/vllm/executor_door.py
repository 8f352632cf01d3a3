"""Stand before an engine core's executor: every call that reaches the workers passes here.

Calls come from ``EngineCore.collective_rpc``, from ``EngineCore.sleep`` and its like, or straight to the executor, which
whoever holds an engine core in its own process can reach. Any of them may change weights, so the gate asks the workers
before the next step. Weights may also change without a call, in a thread of a worker: so each step takes along the
version that the gate believes, and every rank compares it with its own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.vllm import unsupported, worker

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel
    from flashpatch.patches.fp8.vllm.scheduler_gate import SchedulerGate

#: Calls of a step, and others as frequent, none of which writes a weight.
_OF_A_STEP = frozenset(
    {"execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids", "check_health"}
)
#: Calls that set all parameters to zero, by which vLLM's ``/weight_checker`` shows that an update brings every one.
_ZEROES = ("reset_weights",)


class ExecutorDoor:
    """Stand before one executor.

    Args:
        core: the engine core that has the executor.
        gate: hears of every call.

    Attributes:
        runner: the model runner, if the worker is in this process; else None.
        labels: vLLM's weight version when each step in flight was handed to the workers, the oldest first; empty
            before vLLM 0.27, which has none."""

    def __init__(self, core: Any, gate: SchedulerGate) -> None:
        self._core, self._gate = weakref.ref(core), gate
        self._executor = core.model_executor
        self._rpc, self._execute = self._executor.collective_rpc, self._executor.execute_model
        driver = getattr(self._executor, "driver_worker", None)
        self.runner = None if driver is None else driver.model_runner
        self.labels: deque[str] = deque()
        self._open = False
        self._late = ""  # the call that ran out of time, whose answers may still come
        self._executor.collective_rpc, self._executor.execute_model = self._on_call, self._on_execute

    def models(self) -> Sequence[ManagedModel]:
        """Return the models of the worker in this process; none if the workers are elsewhere."""
        return () if self.runner is None else model_registry.all_models(self.runner)

    def ask(self, function: Callable[..., Any], args: tuple = ()) -> list[Any]:
        """Return what ``function(worker, *args)`` gives on every rank; it changes nothing that the gate follows."""
        return self._call(function, args=args)

    def remove(self) -> None:
        """Leave the executor as it was."""
        for name in ("collective_rpc", "execute_model"):
            vars(self._executor).pop(name, None)

    def held_open(self) -> AbstractContextManager[None]:
        """Within, calls are the gate's own."""
        return having(self, "_open", True)

    def _on_call(
        self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None, **how: Any
    ) -> Any:
        """Stand in for ``Executor.collective_rpc``.

        All ranks answer even when one fails: vLLM stops at the first failure, and takes the other ranks' answers for
        those of the next call."""
        core = self._core()
        if self._open or core is None or (isinstance(method, str) and method in _OF_A_STEP):
            return self._call(method, timeout, args, kwargs, **how)
        with self._gate.turn:
            refuse(core.vllm_config, method, args, kwargs or {})
            self._gate.before_call(core)
            if method not in _ZEROES:
                return self._pass_on(method, timeout, args, kwargs, how)
            self.ask(worker.discard, (method,))
            try:
                return self._pass_on(method, timeout, args, kwargs, how)
            finally:
                self.ask(worker.restore_kept)

    def _pass_on(self, method: Any, timeout: Any, args: tuple, kwargs: Any, how: dict) -> Any:
        if self.runner is not None or how:  # the worker is here: exceptions arrive as they are
            return self._call(method, timeout, args, kwargs, **how)
        guarded, its_args = all_ranks.wrap(method, args, kwargs)
        return all_ranks.unwrap(self._call(guarded, timeout, its_args, late=method))

    def _call(self, method: Any, *args: Any, late: Any = None, **kwargs: Any) -> Any:
        """Call the workers, unless an earlier call has run out of time.

        Workers in other processes answer it later, and vLLM takes that for the answer to the next call."""
        if self._late:
            raise PatchError(
                f"{self._late} ran out of time, so the workers' answers to it may come in the place of later ones",
                patch="fp8.vllm.engine_core_init",
                advice="Open the engine again, and give that call more time.",
            )
        try:
            return self._rpc(method, *args, **kwargs)
        except TimeoutError:
            if hasattr(self._executor, "response_mqs"):
                self._late = getattr(late or method, "__qualname__", str(late or method))
            raise

    def _on_execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        core, key = self._core(), self._gate.prefix_key
        if key is not None and core is not None:
            key.check(core.scheduler, scheduler_output.scheduled_new_reqs)
        scheduler_output.flashpatch_version = self._gate.version  # that the workers are believed to hold
        scheduler_output.flashpatch_adapters = self._gate.adapters
        if hasattr(core, "get_weight_version"):
            self.labels.append(core.get_weight_version())
        return self._execute(scheduler_output, *args, **kwargs)


def refuse(vllm_config: Any, method: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse the calls of vLLM's own that discard what no update brings back. Raises PatchError, which names the call
    and what to call instead."""
    if problem := unsupported.at_discard(vllm_config, method, args, kwargs):
        raise PatchError(
            f"{method} discards weights that no update could bring back: {problem.partition('; ')[0]}",
            patch="fp8.vllm.collective_rpc",
            target=f"vllm.v1.worker.gpu_worker:Worker.{method}",
            advice="Call sleep(level=1), which keeps the weights on the host; or open engines of their own "
            "(data_parallel_size=1).",
        )
    if method == "discard" and "weights" in (args[0] if args else kwargs.get("tags", ())):
        raise PatchError(
            "discard of the weights' memory also loses what no update brings back",
            patch="fp8.vllm.collective_rpc",
            target="vllm.v1.worker.gpu_worker:Worker.discard",
            advice="Call sleep(level=2), which keeps that on the host.",
        )
