"""Follow verl's SGLang servers: which replica they are, what they answer, and their end."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from flashpatch import engine
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.sglang_0_5_12.record import REQUIRES
from flashpatch.patches.fp8.verl_sglang import dead_scheduler, expected_processes, http_server
from flashpatch.record import Contract, Patch

FRAMEWORK = "fp8.verl_sglang_0_5_12"
"""Beginning of the ids."""

for_verl = partial(Patch, requires="verl>=0.9", beside=REQUIRES)


async def on_launch(original, self, *args: Any, **kwargs: Any) -> None:
    """Around ``launch_server``, which starts this SGLang without help."""
    engine.require("fp8")
    os.environ.setdefault(fleet.VERL_REPLICA_RANK, str(self.replica_rank))  # as verl does for vLLM; by fleets
    await original(self, *args, **kwargs)


async def on_generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``generate``; see `http_server.complete`."""
    return await http_server.complete(GENERATE, original, self, *args, **kwargs)


LAUNCH = for_verl(
    id=f"{FRAMEWORK}.launch_server",
    targets=http_server.LAUNCH.targets,
    wrapper=on_launch,
    contract=Contract(mentions=("ServerArgs", "Engine._launch_subprocesses")),
    evidence="optional",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere={FRAMEWORK}.generate",
    scope=frozenset({"driver"}),
    why="A server that FlashPatch cannot act in must not start, and an engine of a mixed fleet must know its number.",
    how="Raises if the family was refused; numbers the replica in the environment of its engine.",
    remove_when="verl numbers SGLang's replicas.",
)

GENERATE = for_verl(
    id=f"{FRAMEWORK}.generate",
    targets=http_server.GENERATE.targets,
    wrapper=on_generate,
    contract=http_server.GENERATE.contract,
    evidence="step",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere={FRAMEWORK}.launch_servers",
    scope=frozenset({"driver"}),
    why=http_server.GENERATE.why,
    how=http_server.GENERATE.how,
    remove_when=http_server.GENERATE.remove_when,
)

LAUNCHED = for_verl(
    id=f"{FRAMEWORK}.launch_servers",
    targets=expected_processes.PATCH.targets,
    wrapper=expected_processes.PATCH.wrapper,
    contract=expected_processes.PATCH.contract,
    evidence="optional",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere={FRAMEWORK}.generate",
    scope=expected_processes.PATCH.scope,
    why=expected_processes.PATCH.why,
    how=expected_processes.PATCH.how,
    remove_when=expected_processes.PATCH.remove_when,
)

DEAD = Patch(
    id=f"{FRAMEWORK}.check_processes",
    targets=dead_scheduler.PATCH.targets,
    requires=REQUIRES,
    tested=("0.5.12",),
    wrapper=dead_scheduler.on_check,
    contract=dead_scheduler.PATCH.contract,
    evidence="optional",  # only a death calls for it
    scope=frozenset({"driver"}),
    why=dead_scheduler.PATCH.why,
    how=dead_scheduler.PATCH.how,
    remove_when=dead_scheduler.PATCH.remove_when,
)
