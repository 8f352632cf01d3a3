"""Run one registry per pool as a Ray actor, found by its name from anywhere in a Ray cluster."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.standalone.registry import Registry, WorkerLost

POOLS = ("generation", "logprob")


async def send(handle: Any, payload: Any) -> Any:
    """Call a Ray actor: ``handle`` is (actor, name of its method), ``payload`` its positional and keyword
    arguments.

    Raises:
        WorkerLost: the actor died or cannot be reached.
    """
    from ray.exceptions import RayActorError

    actor, method = handle
    args, kwargs = payload
    try:
        return await getattr(actor, method).remote(*args, **kwargs)
    except RayActorError as error:
        raise WorkerLost(type(error).__name__) from error


async def ping(handle: Any) -> None:
    """Ping an actor by a method that Ray gives every actor."""
    from ray.exceptions import RayActorError

    try:
        await handle[0].__ray_ready__.remote()
    except RayActorError as error:
        raise WorkerLost(type(error).__name__) from error


class RegistryActor(Registry):
    """Run a `Registry` whose workers are Ray actors; use `owner` to create or find one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(send, **{"ping": None, **options})

    async def register_actor(self, name: str, actor: Any, method: str, cap: int | None = None) -> None:
        """Add a worker; requests call its ``method``."""
        await self.register(name, (actor, method), cap)

    async def call(self, tokens: int, prefix: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit a request with the arguments of the worker's method, see `Registry.submit`."""
        return await self.submit((args, kwargs), tokens, prefix=prefix)

    async def report(self) -> dict[str, Any]:
        """`Registry.status`."""
        return self.status()


def owner(pool: str, **options: Any) -> Any:
    """Return the registry of a pool: the first caller creates it, the others find it.

    Args:
        pool: ``"generation"`` or ``"logprob"``.
        options: of `Registry`, without ``send``; they count for the first who asks.

    Returns:
        a handle of a `RegistryActor`.

    Raises:
        PatchError: no such pool.
    """
    import ray

    if pool not in POOLS:
        refuse("registry", "pool", f"is {pool!r}.", f"Choose one of {', '.join(POOLS)}.")
    actor = ray.remote(RegistryActor).options(
        name=f"flashpatch-registry-{pool}", get_if_exists=True, num_cpus=0, max_concurrency=100_000
    )
    return actor.remote(**options)
