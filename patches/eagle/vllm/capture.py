"""Capture the target's hidden states where a step's tokens are sampled, without a forward of their own.

The hook is ``sample_tokens``, in which both runners also propose drafts: there the step's input tokens, their positions
and the final hidden states lie side by side, whether or not the drafter gets to run in that step and whether or not the
engine speculates at all. See `flashpatch.patches.eagle.capture.recorder` for what is kept of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.options import UNTIL_VLLM
from flashpatch.patches.eagle.vllm import scheduler

if TYPE_CHECKING:
    from flashpatch.patches.eagle.capture.recorder import Recorder

_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_OUTPUT, _BATCH = "vllm.v1.core.sched.output:SchedulerOutput", "vllm.v1.worker.gpu.input_batch:InputBatch"
_PLACE = ("vllm.distributed.parallel_state:get_tp_group", "vllm.distributed.parallel_state:get_pp_group")

patches = Patches(
    "eagle",
    "vllm>=0.24",
    scope="worker",
    why="A drafter learns from the target's hidden states, which vLLM computes at every step and throws away.",
    remove_when=UNTIL_VLLM,
)


class Capture:
    """Record for one runner, and count the policy's versions.

    Attributes:
        recorder: None in ranks for which another one records, and when capture is off.
        version: 0 for the weights the engine was opened with, one more after each update or adapter."""

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

    def before_step(self, step: Any) -> None:
        """Note the version of the policy that a step computes on: where updates and adapters are followed the step says it, for
        weights may be loaded long before they count; else it is one more if any were loaded since the last step."""
        version = self.version + self._changed
        if hasattr(step, "flashpatch_version"):
            version = step.flashpatch_version + step.flashpatch_adapters
        self._changed = False
        if version != self.version:
            self.version = version
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
    recorder = None
    if get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0:
        from flashpatch.patches.eagle.capture.recorder import make_recorder

        recorder = make_recorder(engine.options("eagle"))
    return Capture(runner.get_model(), recorder)


def _end_captures(site: Site) -> None:
    for capture in list(_captures.values()):
        if capture is not None:
            capture.close()
    _captures.clear()
    site.unwrap()


@patches.wrap(
    f"{_V2}:GPUModelRunner.execute_model",
    id="eagle.vllm.execute_model_v2",
    relies_on=(f"{_V2}:GPUModelRunner.get_model", *_PLACE, f"{_OUTPUT}.total_num_scheduled_tokens"),
    one_of="eagle.vllm.execute_model",
    undo=_end_captures,
)
@patches.wrap(
    f"{_V1}:GPUModelRunner.execute_model",
    relies_on=(f"{_V1}:GPUModelRunner.get_model", *_PLACE, f"{_OUTPUT}.total_num_scheduled_tokens"),
    one_of="eagle.vllm.execute_model_v2",
    undo=_end_captures,
)
def execute_model(original, self, scheduler_output: Any, *args: Any, **kwargs: Any):
    """End the recording of requests that the scheduler reports as finished, and count policy versions.

    Their names may come again in this step."""
    capture = capture_of(self)
    if capture is not None:
        if capture.recorder is not None and scheduler_output.finished_req_ids:
            tokens = getattr(scheduler_output, scheduler.FINISHED, {})
            capture.recorder.finish({name: tokens.get(name) for name in scheduler_output.finished_req_ids})
        if scheduler_output.total_num_scheduled_tokens:
            capture.before_step(scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


@patches.wrap(
    f"{_V1}:GPUModelRunner.sample_tokens",
    relies_on=(
        "self.execute_model_state",
        "self.propose_draft_token_ids",
        f"{_V1}:ExecuteModelState.hidden_states",
        f"{_V1}:ExecuteModelState.aux_hidden_states",
        f"{_V1}:ExecuteModelState.scheduler_output",
        f"{_OUTPUT}.num_scheduled_tokens",
    ),
    one_of="eagle.vllm.sample_tokens_v2",
)
def sample_tokens(original, self, *args: Any, **kwargs: Any):
    """Note input tokens, positions and states before the step's tokens are sampled and drafts proposed."""
    state, recorder = self.execute_model_state, _recorder_of(self)
    if state is not None and recorder is not None:
        names, scheduled = self.input_batch.req_ids, state.scheduler_output.num_scheduled_tokens
        recorder.step(
            names,
            [scheduled[name] for name in names],
            self.input_ids.gpu,
            self.positions,
            state.hidden_states,
            state.aux_hidden_states,
        )
    return original(self, *args, **kwargs)


@patches.wrap(
    f"{_V2}:GPUModelRunner.sample_tokens",
    relies_on=(
        "self.execute_model_state",
        "self.speculator.propose",
        f"{_V2}:ExecuteModelState.hidden_states",
        f"{_V2}:ExecuteModelState.aux_hidden_states",
        f"{_V2}:ExecuteModelState.input_batch",
        f"{_BATCH}.num_scheduled_tokens",
        f"{_BATCH}.input_ids",
        f"{_BATCH}.positions",
        f"{_BATCH}.req_ids",
    ),
    one_of="eagle.vllm.sample_tokens",
)
def sample_tokens_v2(original, self, *args: Any, **kwargs: Any):
    """Note the same in vLLM's second model runner, its default on GPUs."""
    state, recorder = self.execute_model_state, _recorder_of(self)
    if state is not None and state.hidden_states is not None and recorder is not None:
        batch = state.input_batch
        lengths = batch.num_scheduled_tokens.tolist()
        inputs = batch.input_ids, batch.positions
        recorder.step(batch.req_ids, lengths, *inputs, state.hidden_states, state.aux_hidden_states)
    return original(self, *args, **kwargs)


@patches.wrap(
    "vllm.v1.worker.gpu_worker:Worker.shutdown",
    evidence="optional",
    why="A recorder's threads and memory would outlive its engine, and its last samples would be lost.",
)
def worker_shutdown(original, self, *args: Any, **kwargs: Any):
    """Store what was captured, and end the recorder, as the engine ends."""
    runner = getattr(self, "model_runner", None)
    if runner in _captures and (capture := _captures.pop(runner)) is not None:
        capture.close()
    return original(self, *args, **kwargs)


def _recorder_of(runner: Any) -> Recorder | None:
    capture = _captures.get(runner)
    return capture and capture.recorder
