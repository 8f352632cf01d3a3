"""Capture the target's hidden states where a step's tokens are sampled, without a forward of their own.

The hook is ``sample_tokens``, in which both runners also propose drafts: there the step's input tokens, their
positions and the final hidden states lie side by side, whether or not the drafter gets to run in that step
and whether or not the engine speculates at all. See `flashpatch.patches.eagle.capture.recorder` for what is
kept of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.patches.eagle.vllm import finished_requests
from flashpatch.patches.eagle.vllm.targets import RUNNER, RUNNER_V2, WorkerPatch
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.eagle.capture.recorder import Recorder


class Capture:
    """Record for one runner, and count the policy's versions.

    Attributes:
        recorder: None in ranks for which another one records, and when capture is off.
        version: 0 for the weights the engine was opened with, one more after each update.
    """

    def __init__(self, model: Any, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.version = 0
        self._changed = False
        self._model = weakref.ref(model)
        self._original = vars(model).get("load_weights")
        loaded = model.load_weights

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            """Load weights, and note that the policy has changed."""
            self._changed = True
            return loaded(*args, **kwargs)

        self._wrapped = model.load_weights = load_weights

    def before_step(self) -> None:
        """Count a policy version if weights were loaded since the last step."""
        if self._changed:
            self._changed = False
            self.version += 1
            ledger.note(eagle_policy=self.version)
            if self.recorder is not None:
                self.recorder.version = self.version

    def close(self) -> None:
        """Restore the model's ``load_weights`` and end the recorder."""
        model = self._model()
        if model is not None and vars(model).get("load_weights") is self._wrapped:
            if self._original is None:
                del model.load_weights
            else:
                model.load_weights = self._original
        if self.recorder is not None:
            self.recorder.close()


_captures: weakref.WeakKeyDictionary[Any, Capture | None] = weakref.WeakKeyDictionary()


def capture_of(runner: Any) -> Capture | None:
    """Return the runner's `Capture`, made at the first call; None for a model that generates nothing."""
    try:
        return _captures[runner]
    except KeyError:
        _captures[runner] = capture = _make(runner)
        return capture


def _make(runner: Any) -> Capture | None:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    if getattr(runner, "is_pooling_model", False):
        return None
    ledger.role("worker", tp=get_tp_group().rank_in_group)
    options = engine.options("eagle")
    recorder = None
    if options["capture_rate"] and get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0:
        from flashpatch.patches.eagle.capture.recorder import make_recorder

        recorder = make_recorder(options)
    return Capture(runner.get_model(), recorder)


def on_execute(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """Around ``execute_model``: finish requests that are over before their names may come again."""
    capture = capture_of(self)
    if capture is not None:
        if capture.recorder is not None and scheduler_output.finished_req_ids:
            tokens = getattr(scheduler_output, finished_requests.ATTRIBUTE, {})
            capture.recorder.finish({name: tokens.get(name) for name in scheduler_output.finished_req_ids})
        if scheduler_output.total_num_scheduled_tokens:
            capture.before_step()
    return original(self, scheduler_output, *args, **kwargs)


def on_sample(original, self, *args: Any, **kwargs: Any):
    """Around V1's ``sample_tokens``: note the step's inputs and states."""
    state, capture = self.execute_model_state, _captures.get(self)
    if state is not None and capture is not None and capture.recorder is not None:
        names, scheduled = self.input_batch.req_ids, state.scheduler_output.num_scheduled_tokens
        _step(
            capture.recorder,
            names,
            [scheduled[name] for name in names],
            self.input_ids.gpu,
            self.positions,
            state,
        )
    return original(self, *args, **kwargs)


def on_sample_v2(original, self, *args: Any, **kwargs: Any):
    """Around V2's ``sample_tokens``: note the step's inputs and states."""
    state, capture = self.execute_model_state, _captures.get(self)
    if (
        state is not None
        and state.hidden_states is not None
        and capture is not None
        and capture.recorder is not None
    ):
        batch = state.input_batch
        lengths = batch.num_scheduled_tokens.tolist()
        _step(capture.recorder, batch.req_ids, lengths, batch.input_ids, batch.positions, state)
    return original(self, *args, **kwargs)


def _step(
    recorder: Recorder, names: Iterable[str], lengths: list[int], ids: Any, positions: Any, state: Any
) -> None:
    recorder.step(names, lengths, ids, positions, state.hidden_states, state.aux_hidden_states)


def _undo(site: Site) -> None:
    for capture in list(_captures.values()):
        if capture is not None:
            capture.close()
    _captures.clear()
    site.unwrap()


_WHY = "A drafter learns from the target's hidden states, which vLLM computes at every step and throws away."
_STATE = ("{}:ExecuteModelState.hidden_states", "{}:ExecuteModelState.aux_hidden_states")


def _state_fields(runner: str) -> tuple[str, ...]:
    module = runner.partition(":")[0]
    return tuple(text.format(module) for text in _STATE)


def _execute_patch(id: str, runner: str, other: str) -> Patch:
    return WorkerPatch(
        id=id,
        targets=(f"{runner}.execute_model",),
        wrapper=on_execute,
        undo=_undo,
        contract=Contract(
            params=("scheduler_output",),
            exists=(
                f"{runner}.get_model",
                "vllm.distributed.parallel_state:get_tp_group",
                "vllm.distributed.parallel_state:get_pp_group",
                "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
            ),
        ),
        evidence="step",
        one_of=(other,),
        needs=("eagle.vllm.schedule",),
        why=_WHY,
        how="Ends the recording of requests that the scheduler reports as finished, and counts policy versions.",
    )


EXECUTE = _execute_patch("eagle.vllm.execute_model", RUNNER, "eagle.vllm.execute_model_v2")
EXECUTE_V2 = _execute_patch("eagle.vllm.execute_model_v2", RUNNER_V2, "eagle.vllm.execute_model")

SAMPLE = WorkerPatch(
    id="eagle.vllm.sample_tokens",
    targets=(f"{RUNNER}.sample_tokens",),
    wrapper=on_sample,
    contract=Contract(
        mentions=("self.execute_model_state", "self.propose_draft_token_ids"),
        exists=(
            *_state_fields(RUNNER),
            f"{RUNNER.partition(':')[0]}:ExecuteModelState.scheduler_output",
            "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
        ),
    ),
    evidence="step",
    one_of=("eagle.vllm.sample_tokens_v2",),
    needs=("eagle.vllm.execute_model",),
    why=_WHY,
    how="Notes input tokens, positions and states before the step's tokens are sampled and drafts proposed.",
)

SAMPLE_V2 = WorkerPatch(
    id="eagle.vllm.sample_tokens_v2",
    targets=(f"{RUNNER_V2}.sample_tokens",),
    wrapper=on_sample_v2,
    contract=Contract(
        mentions=("self.execute_model_state", "self.speculator.propose"),
        exists=(
            *_state_fields(RUNNER_V2),
            f"{RUNNER_V2.partition(':')[0]}:ExecuteModelState.input_batch",
            "vllm.v1.worker.gpu.input_batch:InputBatch.num_scheduled_tokens",
            "vllm.v1.worker.gpu.input_batch:InputBatch.input_ids",
            "vllm.v1.worker.gpu.input_batch:InputBatch.positions",
            "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
        ),
    ),
    evidence="step",
    one_of=("eagle.vllm.sample_tokens",),
    needs=("eagle.vllm.execute_model_v2",),
    why=_WHY,
    how="The same in vLLM's second model runner, its default on GPUs.",
)

PATCHES = (EXECUTE, SAMPLE, EXECUTE_V2, SAMPLE_V2)
