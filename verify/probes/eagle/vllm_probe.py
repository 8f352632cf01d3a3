"""What the probe needs to know of vLLM: the job, its drafters, its environment, and the patches that it must call."""

from __future__ import annotations

from functools import partial

from flashpatch.verify.probes.eagle import vllm_job
from flashpatch.verify.probes.eagle.rounds import write_drafters

JOB = vllm_job.__name__
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
MORE = {
    "driver": (),
    "engine-core": ("free_request", "scheduler_init", "collective_rpc"),
    "worker": ("worker",),
}
"""Patches that the job must have called beside those that are due by their records, by role."""

models = partial(write_drafters, engine="vllm")
"""Write the drafters to a directory."""
