"""Write an expected ledger row for each Ray worker, and for each of verl's servers, that is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches, Shared

RAY = "verl.single_controller.ray.base"
SHARED: Shared = {
    "evidence": "optional",
    "scope": ("driver", "trainer"),
    "why": "A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    "remove_when": "never: this is the evidence itself.",
}

patches = Patches("fp8", "verl>=0.9", **SHARED)


@patches.wrap(
    f"{RAY}:RayWorkerGroup._init_with_resource_pool",
    relies_on=("self._create_worker", f"{RAY}:RayWorkerGroup._create_worker"),
    when="anywhere=fp8.verl.checkpoint_manager_update_weights",
)
def init_with_resource_pool(original, self, *args: Any, **kwargs: Any) -> Any:
    """Ask each new actor for its host and pid, and write an expected row with them.

    The workers record their roles themselves."""
    import ray

    result = original(self, *args, **kwargs)
    _expect(ray.get([worker.__ray_call__.remote(_identity()) for worker in self._workers]), ())
    return result


def of_servers(patches: Patches, replica: str, when: str) -> Callable[..., Any]:
    """Add the patch for the servers of one engine, which verl's class ``replica``, ``"package.module:Class"``,
    launches; ``when`` as in `Patch`."""

    @patches.wrap(f"{replica}.launch_servers", relies_on="self.servers", when=when, **SHARED)
    async def launch_servers(original, self, *args: Any, **kwargs: Any) -> Any:
        """Ask each new actor for its host and pid, and write an expected row with them: each server drives its engine."""
        result = await original(self, *args, **kwargs)
        for server in self.servers:
            _expect([await server.__ray_call__.remote(_identity())], ("driver",))
        return result

    return launch_servers


def _expect(identities: Iterable[tuple[str, int]], roles: tuple[str, ...]) -> None:
    for host, pid in identities:
        ledger.expect(pid, roles=roles, families=tuple(engine.manager.selection.choices), host=host)


def _identity() -> Any:
    """Return a function that Ray pickles by value, so that it also runs where FlashPatch is not installed."""

    def identity(actor: Any) -> tuple[str, int]:
        import os
        import re

        return re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename).lstrip(".")[:100], os.getpid()

    return identity
