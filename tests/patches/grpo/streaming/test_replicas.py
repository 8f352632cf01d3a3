"""Servers that die before and during an update: the update reaches those that are left, or the job ends by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray
import ray_start

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming.replicas import Replicas

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray_start.ask_again()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Server:
    """Stand for a rollout server, a process that can die."""

    def abort(self) -> None:
        pass


@ray.remote(num_cpus=0)
class Balancer:
    """Stand for verl's balancer."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_servers(self, names: list[str]) -> None:
        self.removed += names

    def names(self) -> list[str]:
        return self.removed


class Replica:
    def __init__(self, number: int) -> None:
        self._server_address, self.server = f"server-{number}", Server.remote()
        self.workers = [self.server]

    async def abort_all_requests(self) -> None:
        await self.server.abort.remote()


class Sync:
    """Stand for verl's checkpoint manager: an update fails as long as one of its replicas is dead."""

    def __init__(
        self, replicas: list[Replica], die: tuple[int, ...] = (), error: Exception | None = None
    ) -> None:
        self.replicas, self.die, self.error = replicas, list(die), error
        self.updates: list[list[str]] = []

    def update_weights(self, step: int) -> dict[str, int]:
        if self.error:
            raise self.error
        self.updates.append([one._server_address for one in self.replicas])
        if self.die:
            _kill(self.replicas[self.die.pop()].server)
        ray.get([one.server.abort.remote() for one in self.replicas])
        return {"step": step}

    def remove_replicas(self, dead: list[Replica]) -> None:
        self.replicas = [one for one in self.replicas if one not in dead]


def _kill(server) -> None:
    """Kill a server and wait until it is dead; Ray kills in the background."""
    ray.kill(server)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(server.abort.remote())


def _made(count: int, **more) -> tuple[Replicas, Sync, Balancer]:
    sync, balancer = Sync([Replica(number) for number in range(count)], **more), Balancer.remote()
    return Replicas(SimpleNamespace(global_load_balancer=balancer), sync), sync, balancer


def test_a_dead_server_is_left_out():
    replicas, sync, balancer = _made(3)
    _kill(sync.replicas[1].server)
    assert replicas.update_weights(7) == {"step": 7}
    assert sync.updates == [["server-0", "server-2"]]
    assert ray.get(balancer.names.remote()) == ["server-1"]


def test_an_update_during_which_a_server_dies_is_repeated_without_it():
    replicas, sync, balancer = _made(3, die=(2,))
    assert replicas.update_weights(8) == {"step": 8}
    assert sync.updates == [["server-0", "server-1", "server-2"], ["server-0", "server-1"]]
    assert ray.get(balancer.names.remote()) == ["server-2"]


def test_the_last_servers_death_ends_the_job_by_name():
    replicas, sync, _ = _made(1, die=(0,))
    with pytest.raises(PatchError, match="lost the last rollout server"):
        replicas.update_weights(9)


def test_another_failure_of_an_update_is_not_repeated():
    replicas, sync, balancer = _made(2, error=ValueError("shapes differ"))
    with pytest.raises(ValueError, match="shapes differ"):
        replicas.update_weights(9)
    assert len(sync.replicas) == 2 and ray.get(balancer.names.remote()) == []
