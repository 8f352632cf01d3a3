"""What the probe needs to know of vLLM: the job, its drafters, its environment, and the patches that it must call."""

from __future__ import annotations

from functools import partial

from flashpatch.verify.probes.eagle import vllm_job
from flashpatch.verify.probes.eagle.rounds import write_drafters

JOB = vllm_job.__name__
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
DUE = (
    ("sample_tokens", "sample_tokens_v2"),
    ("execute_model", "execute_model_v2"),
    "free_request",
    "schedule",
    "create_speculative_config",
    "scheduler_init",
    "update_from_output",
    "worker",
    "collective_rpc",
)
"""Patches that the job must have called; of those in a tuple one, as vLLM has two model runners."""

models = partial(write_drafters, engine="vllm")
"""Write the drafters to a directory."""
