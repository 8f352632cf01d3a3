"""A step's orders: when they were begun, and what they tell the workers of requests that are over."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.vllm import ending, speculate
from flashpatch.patches.eagle.vllm.common import SCHEDULER, TEXT
from flashpatch.record import Contract, Patch


def on_schedule(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.schedule``."""
    controller = speculate.of(self)
    began = controller.begin() if controller is not None else None
    orders = original(self, *args, **kwargs)
    if began is not None:
        setattr(orders, speculate.BEGAN, began)
    ending.attach(self, orders)
    return orders


PATCH = Patch(
    id="eagle.vllm.orders",
    targets=(f"{SCHEDULER}.schedule",),
    wrapper=on_schedule,
    contract=Contract(
        mentions=("self.dynamic_sd_lookup",),
        exists=("vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",),
    ),
    evidence="step",
    needs=("eagle.vllm.ending",),
    why="The captured states are in the workers, which may be other processes, and a step's time starts here.",
    how="Adds the tokens of requests that workers are told to forget to the orders that tell them.",
    **TEXT,
)
