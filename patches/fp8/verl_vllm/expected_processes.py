"""Write an expected ledger row for each of verl's vLLM servers."""

from __future__ import annotations

from flashpatch.patches.fp8.verl.expected_processes import on_servers
from flashpatch.record import Contract, Patch

PATCH = Patch(
    id="fp8.verl_vllm.launch_servers",
    targets=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica.launch_servers",),
    requires="verl>=0.9",
    wrapper=on_servers,
    contract=Contract(mentions=("self.servers",)),
    evidence="optional",
    scope=frozenset({"driver", "trainer"}),
    why="A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    how="Asks each new server for its host and pid, and writes an expected row with them.",
    remove_when="never: this is the evidence itself.",
)
