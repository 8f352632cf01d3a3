"""A step's orders: when they were begun, and what they tell the workers of requests that are over."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.vllm import finished_requests, spec_controller
from flashpatch.patches.eagle.vllm.targets import SCHEDULER, TEXT
from flashpatch.record import Contract, Patch


def on_schedule(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.schedule``."""
    controller = spec_controller.of(self)
    began = controller.begin() if controller is not None else None
    orders = original(self, *args, **kwargs)
    if began is not None:
        setattr(orders, spec_controller.BEGAN, began)
    finished_requests.attach(self, orders)
    return orders


PATCH = Patch(
    id="eagle.vllm.schedule",
    targets=(f"{SCHEDULER}.schedule",),
    wrapper=on_schedule,
    contract=Contract(
        mentions=("self.dynamic_sd_lookup",),
        exists=("vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",),
    ),
    evidence="step",
    needs=("eagle.vllm.free_request",),
    why="The captured states are in the workers, which may be other processes, and a step's time starts here.",
    how="Adds the tokens of requests that workers are told to forget to the orders that tell them.",
    **TEXT,
)
