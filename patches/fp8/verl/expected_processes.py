"""Write an expected ledger row for each Ray worker that is started."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.record import Contract, Patch

RAY = "verl.single_controller.ray.base"


def on_workers(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``RayWorkerGroup._init_with_resource_pool``. The workers record their roles themselves."""
    import ray

    result = original(self, *args, **kwargs)
    _expect(ray.get([worker.__ray_call__.remote(_identity()) for worker in self._workers]), ())
    return result


async def on_servers(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around a replica's ``launch_servers``: each server is a driver of its engine."""
    result = await original(self, *args, **kwargs)
    for server in self.servers:
        _expect([await server.__ray_call__.remote(_identity())], ("driver",))
    return result


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


_patch = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",
    scope=frozenset({"driver", "trainer"}),
    why="A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    how="Asks each new actor for its host and pid, and writes an expected row with them.",
    remove_when="never: this is the evidence itself.",
)

PATCH = _patch(
    id="fp8.verl.init_with_resource_pool",
    when="anywhere=fp8.verl.checkpoint_manager_update_weights",
    targets=(f"{RAY}:RayWorkerGroup._init_with_resource_pool",),
    wrapper=on_workers,
    contract=Contract(mentions=("self._create_worker",), exists=(f"{RAY}:RayWorkerGroup._create_worker",)),
)


def of_servers(patch_id: str, replica: str) -> Patch:
    """Make the record for the servers of one engine.

    Args:
        patch_id: id of the record.
        replica: verl's class that launches them, as ``"package.module:Class"``.
    """
    servers = patch_id.rpartition(".")[0]
    return _patch(
        id=patch_id,
        when=f"anywhere=fp8.verl.validate_config_rollout anywhere={servers}.generate",
        targets=(f"{replica}.launch_servers",),
        wrapper=on_servers,
        contract=Contract(mentions=("self.servers",)),
    )
