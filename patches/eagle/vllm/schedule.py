"""Add to each step's ``SchedulerOutput`` when it started and the final tokens of finished requests."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.vllm import finished_requests, history_drafts, spec_controller
from flashpatch.patches.eagle.vllm.targets import SCHEDULER, EnginePatch
from flashpatch.record import Contract


def on_schedule(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.schedule``: add start time and final tokens to its output."""
    history = history_drafts.history_of(self)
    if history is not None:
        history.step_started()
    controller = spec_controller.controller_of(self)
    started = None
    if controller is not None:
        started = controller.step_started(self.running)
        if history is None:  # whose drafts are as long as they should be
            controller.drop_unasked_drafts(self.running)
    scheduler_output = original(self, *args, **kwargs)
    if controller is not None:
        setattr(scheduler_output, spec_controller.STARTED, started)
        controller.step_scheduled(scheduler_output)
    finished_requests.attach(self, scheduler_output)
    return scheduler_output


PATCH = EnginePatch(
    id="eagle.vllm.schedule",
    targets=(f"{SCHEDULER}.schedule",),
    wrapper=on_schedule,
    contract=Contract(
        mentions=("self.dynamic_sd_lookup", "self.running", "request.spec_token_ids"),
        exists=(
            "vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",
            "vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule",
            "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
            "vllm.v1.request:Request.num_computed_tokens",
            "vllm.v1.request:Request.num_prompt_tokens",
        ),
    ),
    evidence="step",
    needs=("eagle.vllm.free_request",),
    why="The captured states are in the workers, which may be other processes, and a step's time starts here.",
    how="Adds the final tokens of finished requests, and the time, to the scheduler's output. Drops drafts beyond the "
    "number that was scheduled, of which vLLM 0.31's second model runner makes the maximum at every step.",
)
