"""Write an expected ledger row for each Ray worker, and for each of verl's servers, that is started; tell servers of a policy that a sync is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches, Shared
from flashpatch.errors import PatchError

RAY = "verl.single_controller.ray.base"
DUE = "flashpatch_sync_due"
"""The attribute of a server by which whoever launches it says that a trainer will send it weights."""
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

    @patches.wrap(
        f"{replica}.launch_servers",
        relies_on=("self.servers", "self.is_reward_model", "self.is_teacher_model"),
        when=when,
        **SHARED,
    )
    async def launch_servers(original, self, *args: Any, **kwargs: Any) -> Any:
        """Write an expected row with each new actor's host and pid: each server drives its engine; one of a policy gets a sync."""
        result = await original(self, *args, **kwargs)
        due = not (self.is_reward_model or self.is_teacher_model)
        for server in self.servers:
            _expect([await server.__ray_call__.remote(_identity(due))], ("driver",))
        return result

    return launch_servers


def _expect(identities: Iterable[tuple[str, int]], roles: tuple[str, ...]) -> None:
    for host, pid in identities:
        ledger.expect(pid, roles=roles, families=tuple(engine.manager.selection.choices), host=host)


def check_synced(server: Any, patch_id: str) -> None:
    """Raise PatchError if a server of a policy was launched, perhaps in place of a lost one, and no sync has ended since."""
    if getattr(server, DUE, False) and server.global_steps is None:
        raise PatchError(
            f"the server of replica {server.replica_rank} has had no weights from its trainer since it was started.",
            patch=patch_id,
            advice="Send a request after the next sync. A server without a trainer is told whose weights it has by "
            "server.set_global_steps.remote(0).",
        )


def _identity(due: bool = False) -> Any:
    """Return a function that Ray pickles by value, so that it also runs where FlashPatch is not installed; with ``due`` a sync is."""
    name = DUE

    def identity(actor: Any) -> tuple[str, int]:
        import os
        import re

        if due:
            setattr(actor, name, True)
        return re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename).lstrip(".")[:100], os.getpid()

    return identity
