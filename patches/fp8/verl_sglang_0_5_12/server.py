"""Follow verl's SGLang servers: which replica they are, what they answer, and their end."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.fp8.sglang_0_5_12.record import REQUIRES
from flashpatch.patches.fp8.verl.expected_processes import of_requests, of_servers
from flashpatch.patches.fp8.verl_sglang import http_server

NAME = "verl_sglang_0_5_12"
"""Second part of the ids."""

_GENERATED = f"anywhere=fp8.verl.validate_config_rollout anywhere=fp8.{NAME}.generate"

patches = Patches("fp8", "verl>=0.9", framework=NAME, beside=REQUIRES, scope="driver")
engines = Patches("fp8", REQUIRES, framework="sglang_0_5_12", tested=("0.5.12", "0.5.20"))


@patches.wrap(f"{http_server.SERVER}.launch_server", when=_GENERATED, **http_server.LAUNCH)
async def launch_server(original, self, *args: Any, **kwargs: Any) -> None:
    """See `http_server.launch`."""
    await http_server.launch(original, self, *args, **kwargs)


@patches.wrap(
    f"{http_server.SERVER}.generate",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere=fp8.{NAME}.launch_servers",
    **http_server.GENERATE,
)
async def generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """See `http_server.complete`."""
    return await http_server.complete(patches.of(generate), original, self, *args, **kwargs)


launch_servers = of_servers(patches, http_server.REPLICA, _GENERATED)
generate_request_synced = of_requests(engines, http_server.REQUESTS, f"anywhere=fp8.{NAME}.generate")
check_processes = engines.wrap(f"{http_server.WATCHDOG}._check_processes", **http_server.CHECK)(
    http_server.check_processes
)
