"""Write an expected ledger row for each of verl's vLLM servers."""

from __future__ import annotations

from flashpatch.patches.fp8.verl.expected_processes import of_servers

PATCH = of_servers(
    "fp8.verl_vllm.launch_servers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica",
)
