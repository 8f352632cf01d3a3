"""Write an expected ledger row for each Ray worker, and for each of verl's servers, that is started; a server that a trainer will
sync answers nothing before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches, Shared
from flashpatch.errors import PatchError

RAY = "verl.single_controller.ray.base"
MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
DUE = "flashpatch_sync_due"
"""The attribute by which whoever starts a replica says that a trainer will sync it; of an engine: the server to which that was said."""
_SYNCED = "anywhere=fp8.verl.checkpoint_manager_update_weights"
SHARED: Shared = {
    "evidence": "optional",
    "scope": ("driver", "trainer"),
    "why": "A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    "remove_when": "never: this is the evidence itself.",
}
FIRST: Shared = {
    "evidence": "optional",
    "scope": "driver",
    "why": "A server that was started in place of a lost one holds the checkpoint's weights.",
    "remove_when": "verl's servers answer nothing before their first sync.",
}

patches = Patches("fp8", "verl>=0.9", **SHARED)
syncs = Patches("fp8", "verl>=0.9", **FIRST)


@patches.wrap(
    f"{RAY}:RayWorkerGroup._init_with_resource_pool",
    relies_on=("self._create_worker", f"{RAY}:RayWorkerGroup._create_worker"),
    when=_SYNCED,
)
def init_with_resource_pool(original, self, *args: Any, **kwargs: Any) -> Any:
    """Ask each new actor for its host and pid, and write an expected row with them.

    The workers record their roles themselves."""
    import ray

    result = original(self, *args, **kwargs)
    _expect(ray.get([worker.__ray_call__.remote(_identity()) for worker in self._workers]), ())
    return result


@syncs.wrap(f"{MANAGER}.add_replicas", id="fp8.verl.add_replicas", relies_on="self.replicas")
@syncs.wrap(
    f"{MANAGER}.__init__",
    id="fp8.verl.checkpoint_engine_manager_init",
    relies_on="self.replicas",
    when=_SYNCED,
)
def holds_replicas(original, self, *args: Any, **kwargs: Any) -> None:
    """Tell the servers of the replicas that a manager will sync to answer nothing before."""
    import ray

    original(self, *args, **kwargs)
    told = [one.__ray_call__.remote(_identity(True)) for replica in self.replicas for one in replica.servers]
    if told:
        ray.wait(told, num_returns=len(told))  # what the sync itself does about one that has died stays


def of_servers(patches: Patches, replica: str, when: str) -> Callable[..., Any]:
    """Add the patch for the servers of one engine, which verl's class ``replica``, ``"package.module:Class"``,
    launches; ``when`` as in `Patch`."""

    @patches.wrap(f"{replica}.launch_servers", relies_on="self.servers", when=when, **SHARED)
    async def launch_servers(original, self, *args: Any, **kwargs: Any) -> Any:
        """Write an expected row with each new actor's host and pid: each server drives its engine."""
        result = await original(self, *args, **kwargs)
        for server in self.servers:
            _expect([await server.__ray_call__.remote(_identity(getattr(self, DUE, False)))], ("driver",))
        return result

    return launch_servers


def _expect(identities: Iterable[tuple[str, int]], roles: tuple[str, ...]) -> None:
    for host, pid in identities:
        ledger.expect(pid, roles=roles, families=tuple(engine.manager.selection.choices), host=host)


def of_requests(patches: Patches, target: str, when: str) -> Callable[..., Any]:
    """Add the patch for ``target``, which all requests to one engine reach: verl's, and those to its HTTP address."""

    @patches.wrap(target, when=when, **FIRST)
    def generate_request_synced(original, self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Refuse requests until the server has had the first sync from the trainer that it was told of."""
        server = getattr(self, DUE, None)
        if server is None or server.global_steps is not None:
            return original(self, *args, **kwargs)
        return _refused(server.replica_rank, patches.of(generate_request_synced).id)

    return generate_request_synced


async def _refused(rank: int, patch: str) -> AsyncIterator[Any]:
    raise PatchError(
        f"the server of replica {rank} has had no weights from its trainer since it was started.",
        patch=patch,
        advice="Send a request after the next sync.",
    )
    yield  # verl and the HTTP endpoints expect errors while they iterate


def _identity(due: bool = False) -> Any:
    """Return a function that Ray pickles by value, so that it also runs where FlashPatch is not installed; with ``due`` it also marks
    the engine that the server drives."""
    name = DUE

    def identity(actor: Any) -> tuple[str, int]:
        import os
        import re

        held = getattr(actor, "engine", None) or getattr(actor, "tokenizer_manager", None)
        if due and held is not None:
            setattr(held, name, actor)
        return re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename).lstrip(".")[:100], os.getpid()

    return identity
