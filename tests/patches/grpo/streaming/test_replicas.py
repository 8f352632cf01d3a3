"""Servers that die before and during an update: the update reaches those that are left, or the job ends by name."""

import time
from types import SimpleNamespace

import pytest
import ray
from machine import limit

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import replicas as replicas_module
from flashpatch.patches.grpo.streaming.replicas import Replicas

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("cluster")]


@ray.remote(num_cpus=0)
class Server:
    """Stand for a rollout server, a process that can die or hang."""

    hangs = False

    def abort(self) -> None:
        if self.hangs:
            time.sleep(600)

    def hang(self) -> None:
        self.hangs = True


@ray.remote(num_cpus=0)
class Balancer:
    """Stand for verl's balancer."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.added: list[str] = []

    def remove_servers(self, names: list[str]) -> None:
        self.removed += names

    def add_servers(self, servers: dict[str, object]) -> None:
        self.added += servers

    def names(self) -> list[str]:
        return self.removed

    def added_names(self) -> list[str]:
        return self.added


class Replica:
    unreached = 0  # so often Ray will not reach it

    def __init__(self, number: int, **options) -> None:
        name = f"server-{number}" + options.pop("suffix", "")
        self.replica_rank, self._server_address = number, name
        self.server = self._server_handle = Server.options(**options).remote()
        self.servers = self.workers = [self.server]
        self.resource_pool = SimpleNamespace(pgs=None)
        self.no_devices = [False, True]  # Ray has those of a lost server back after a while

    async def init_standalone(self) -> None:
        if self.no_devices.pop():
            raise ValueError("Total available GPUs 0 is less than total desired GPUs 1")
        await self.server.abort.remote()

    async def abort_all_requests(self) -> None:
        if self.unreached:
            self.unreached -= 1
            raise ray.exceptions.ActorUnavailableError("a connection broke", None)
        await self.server.abort.remote()


class Sync:
    """Stand for verl's checkpoint manager: an update fails as long as one of its replicas is dead."""

    def __init__(self, replicas: list[Replica], die: tuple[int, ...] = (), error: Exception | None = None):
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

    def add_replicas(self, replicas: list[Replica]) -> None:
        self.replicas += replicas


def _kill(server) -> None:
    """Kill a server and wait until it is dead; Ray kills in the background."""
    ray.kill(server)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(server.abort.remote())


def _made(count: int, **more) -> tuple[Replicas, Sync, Balancer]:
    sync, balancer = Sync([Replica(number) for number in range(count)], **more), Balancer.remote()
    return Replicas(SimpleNamespace(global_load_balancer=balancer), sync, replace=0), sync, balancer


def test_a_server_that_dies_before_or_during_an_update_is_left_out():
    replicas, sync, balancer = _made(3)
    _kill(sync.replicas[1].server)
    assert replicas.update_weights(7) == {"step": 7}
    assert sync.updates == [["server-0", "server-2"]]
    assert ray.get(balancer.names.remote()) == ["server-1"]
    replicas, sync, balancer = _made(3, die=(2,))
    assert replicas.update_weights(8) == {"step": 8}
    assert sync.updates == [["server-0", "server-1", "server-2"], ["server-0", "server-1"]]
    assert ray.get(balancer.names.remote()) == ["server-2"]


def test_too_few_devices_for_one_server_are_named():
    """Verl starts none then, without a word."""
    with pytest.raises(PatchError, match="has no rollout server: none was started: .*n_gpus_per_node"):
        _made(0)[0].update_weights(0)


def test_the_last_servers_death_in_an_update_or_between_two_ends_the_job_by_name(monkeypatch):
    replicas, sync, _ = _made(1, die=(0,))
    with pytest.raises(PatchError, match="has no rollout server: died"):
        replicas.update_weights(9)
    monkeypatch.setattr(replicas_module, "PING", 0.0)
    replicas, sync, _ = _made(2)
    for number in (1, 0):
        replicas.look()
        _kill(sync.replicas[number].server)
    with pytest.raises(PatchError, match="has no rollout server: died"):
        replicas.look()


def test_another_failure_of_an_update_is_not_repeated():
    replicas, sync, balancer = _made(2, error=ValueError("shapes differ"))
    with pytest.raises(ValueError, match="shapes differ"):
        replicas.update_weights(9)
    assert len(sync.replicas) == 2 and ray.get(balancer.names.remote()) == []


def _replaced(count: int, again, replace: int) -> tuple[Replicas, Sync, Balancer]:
    """Like `_made`; ``again`` starts a replica of a rank in the place of a dead one."""
    replicas, sync, balancer = _made(count)
    rollout = SimpleNamespace(n_gpus_per_node=1)
    manager = SimpleNamespace(
        global_load_balancer=balancer,
        rollout_config=rollout,
        model_config=None,
        rollout_replica_class=lambda replica_rank, **_: again(replica_rank),
    )
    return Replicas(manager, sync, replace), sync, balancer


def _update_until(condition, replicas: Replicas) -> None:
    end = time.monotonic() + limit(60)
    while not condition():
        assert time.monotonic() < end
        replicas.update_weights(1)
        time.sleep(0.05)


def test_a_dead_server_is_started_again_and_serves_after_an_update():
    replicas, sync, balancer = _replaced(2, lambda rank: Replica(rank, suffix="-again"), replace=1)
    _kill(sync.replicas[1].server)
    replicas.update_weights(1)
    assert sync.updates == [["server-0"]] and ray.get(balancer.added_names.remote()) == []
    _update_until(lambda: len(sync.replicas) == 2, replicas)
    assert sync.updates[-1] == ["server-0", "server-1-again"]
    assert ray.get(balancer.added_names.remote()) == ["server-1-again"]
    _kill(sync.replicas[1].server)  # an update reached all, so the next one that dies is started again too
    replicas.update_weights(1)
    _update_until(lambda: len(sync.replicas) == 2, replicas)


def test_an_update_waits_for_the_server_in_place_of_the_last_or_is_repeated_with_it():
    replicas, sync, balancer = _replaced(1, lambda rank: Replica(rank, suffix="-again"), replace=1)
    _kill(sync.replicas[0].server)
    assert replicas.update_weights(1) == {"step": 1}
    assert sync.updates == [["server-0-again"]]
    assert ray.get(balancer.added_names.remote()) == ["server-0-again"]
    replicas, sync, _ = _replaced(1, lambda rank: Replica(rank, suffix="-again"), replace=1)
    sync.die = [0]
    assert replicas.update_weights(1) == {"step": 1}
    assert sync.updates == [["server-0"], ["server-0-again"]]


def test_the_last_server_that_cannot_be_started_again_ends_the_job_by_name():
    def fail(rank: int) -> Replica:
        raise OSError("no room")

    replicas, sync, _ = _replaced(1, fail, replace=1)
    _kill(sync.replicas[0].server)
    with pytest.raises(PatchError, match=r"has no rollout server: died \(ActorDiedError\)\."):
        replicas.update_weights(1)


def test_within_a_step_a_server_without_weights_is_none(monkeypatch):
    monkeypatch.setattr(replicas_module, "PING", 0.0)
    replicas, sync, _ = _replaced(2, lambda rank: Replica(rank, suffix="-again"), replace=2)
    _kill(sync.replicas[0].server)
    replicas.update_weights(1)
    _kill(sync.replicas[0].server)
    with pytest.raises(PatchError, match="in their place have no weights before the step ends"):
        replicas.look()


def test_the_name_of_a_server_that_hangs_is_free_for_the_next(monkeypatch):
    monkeypatch.setattr(replicas_module, "ANSWER", limit(3.0))
    replicas, sync, balancer = _replaced(2, lambda at: Replica(at, suffix="-again", name="verl"), replace=1)
    sync.replicas[1] = Replica(1, name="verl")
    replicas.answered(0.1)
    ray.get(sync.replicas[0].server.abort.remote())  # it has started, and answers at once from now on
    ray.get(sync.replicas[1].server.hang.remote())
    replicas.update_weights(1)
    _update_until(lambda: len(sync.replicas) == 2, replicas)
    assert ray.get(balancer.added_names.remote()) == ["server-1-again"]


def test_servers_that_cannot_be_started_again_are_given_up():
    starts = []

    def fail(rank: int) -> Replica:
        starts.append(Replica(rank))
        starts[-1].no_devices = []  # an IndexError in the middle of its start
        return starts[-1]

    replicas, sync, balancer = _replaced(4, fail, replace=2)
    for one in list(sync.replicas[1:]):
        _kill(one.server)
    _update_until(lambda: len(starts) == 2, replicas)
    for _ in range(3):
        replicas.update_weights(2)
    for one in starts:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(one.server.abort.remote())
    assert len(starts) == 2 and [one._server_address for one in sync.replicas] == ["server-0"]
    assert ray.get(balancer.added_names.remote()) == []


def test_a_server_that_cannot_be_reached_for_now_is_asked_again():
    """It was taken for dead, and a live server was removed for good."""
    replicas, sync, balancer = _made(2)
    sync.replicas[1].unreached = 2
    assert replicas.update_weights(3) == {"step": 3}
    assert sync.updates == [["server-0", "server-1"]] and ray.get(balancer.names.remote()) == []


def test_a_server_that_is_removed_is_ended(monkeypatch):
    """Nothing starts another in its place: it must not come back with old weights."""
    monkeypatch.setattr(replicas_module, "ANSWER", limit(1.0))
    replicas, sync, balancer = _made(2)
    replicas.answered(0.01)
    gone = sync.replicas[1].server
    ray.get([one.server.abort.remote() for one in sync.replicas])
    ray.get(gone.hang.remote())
    replicas.update_weights(3)
    assert sync.updates == [["server-0"]] and ray.get(balancer.names.remote()) == ["server-1"]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(gone.hang.remote())


def test_the_time_to_stop_grows_with_the_slowest_answer():
    """30 s were too few on a slow machine, and its servers were taken for dead."""
    replicas, _, _ = _made(1)
    assert replicas.stop_seconds == 300, "nothing is known before the first answer"
    replicas.answered(0.2)
    assert replicas.stop_seconds == 30
    replicas.answered(12.0)
    replicas.answered(0.1)
    assert replicas.stop_seconds == 120
