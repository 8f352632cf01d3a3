"""Write an expected ledger row for each of verl's SGLang servers."""

from __future__ import annotations

from flashpatch.decorate import Patches
from flashpatch.patches.fp8.verl.expected_processes import of_servers

REPLICA = "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica"
patches = Patches("fp8", "verl>=0.9", framework="verl_sglang")

PATCH = patches.of(
    of_servers(
        patches, REPLICA, "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.generate"
    )
)
