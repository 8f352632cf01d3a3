"""Write an expected ledger row for each of verl's SGLang servers."""

from __future__ import annotations

from flashpatch.patches.fp8.verl.expected_processes import of_servers

PATCH = of_servers(
    "fp8.verl_sglang.launch_servers",
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica",
)
