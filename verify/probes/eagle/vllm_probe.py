"""What the probe needs to know of vLLM: the job, its environment, and the patches that it must call."""

from __future__ import annotations

from flashpatch.verify.probes.eagle import vllm_job

JOB = vllm_job.__name__
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
DUE = (
    "sample_tokens",
    "execute_model",
    "free_request",
    "schedule",
    "create_speculative_config",
    "scheduler_init",
    "update_from_output",
    "worker",
    "collective_rpc",
)
"""Patches that the job must have called."""
