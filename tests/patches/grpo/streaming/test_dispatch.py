"""Agent loop workers that die: their prompts go to others, and another worker is started, so often as groups end."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray
from machine import limit

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.routing import resubmit
from flashpatch.patches.grpo.streaming import dispatch
from flashpatch.patches.grpo.streaming.dispatch import Dispatcher

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("cluster")]


@ray.remote(num_cpus=0)
class Worker:
    """Stand for verl's worker, a process that can die."""

    def __init__(self, fails: bool) -> None:
        if fails:
            raise RuntimeError("cannot start")
        self.got: list[str] = []

    def generate_sequences(self, prompts: dict[str, list[str]]) -> None:
        self.got += prompts["uid"]

    def uids(self) -> list[str]:
        return self.got

    def pid(self) -> int:
        return os.getpid()

    def client(self) -> str | None:
        return resubmit._this_client()


@ray.remote
def unreached() -> None:
    """Fail as a call to an actor that Ray cannot reach."""
    raise ray.exceptions.ActorUnavailableError("a connection broke", None)


class Unreached:
    """A worker whose next call of each of these methods does not reach it."""

    def __init__(self, worker, *methods: str) -> None:
        self.worker, self.methods, self.failed = worker, list(methods), unreached.remote()
        ray.wait([self.failed])  # so that whoever asks sees at once how it ended

    def __getattr__(self, name: str):
        if name in self.methods:
            self.methods.remove(name)
            return SimpleNamespace(remote=lambda *given: self.failed)
        return getattr(self.worker, name)


class Prompts(list):
    """Stand for verl's TensorDict of prompts; ``validate`` if that is set."""

    validate = False

    def __contains__(self, name: str) -> bool:
        return self.validate

    def __getitem__(self, name: str) -> list[str]:
        assert name == "uid"
        return list(self)

    def chunk(self, count: int) -> list[dict[str, list[str]]]:
        return [{"uid": list(self)[start::count]} for start in range(count)]


class ForValidation(Prompts):
    validate = True


class Manager:
    """Stand for verl's manager, which starts workers by this method alone."""

    fails = False

    def __init__(self, count: int) -> None:
        self.agent_loop_workers = [Worker.remote(False) for _ in range(count)]

    async def _init_agent_loop_workers(self) -> None:
        self.agent_loop_workers = [
            Worker.remote(self.fails) for _ in range(self.rollout_config.agent.num_workers)
        ]


def again(uids: list[str], partition: str = "train", prompts: ForValidation | None = None) -> Prompts:
    """The queue holds training's prompts, and none of validation."""
    assert (prompts is None) == (partition == "train")
    return Prompts(uids) if prompts is None else ForValidation(one for one in prompts if one in uids)


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    monkeypatch.setattr(dispatch, "again", again)
    monkeypatch.setattr(dispatch, "PING", 0.1)


def until(condition) -> None:
    end = time.monotonic() + limit(60)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_prompts_of_a_dead_worker_go_to_others_and_another_one_is_started():
    manager = Manager(2)
    dispatcher = Dispatcher(manager, replace=1)
    dispatcher.generate_sequences(Prompts("abcd"))
    first, second = dispatcher.workers
    lost = ray.get(first.uids.remote())
    ray.kill(first)
    found = []
    until(lambda: found.append(dispatcher.recover("abcd")) or any(found))
    assert sum(found) == len(lost) == 2
    until(lambda: dispatcher.recover("abcd") == 0 and len(dispatcher.workers) == 2)
    assert first not in dispatcher.workers and manager.agent_loop_workers == dispatcher.workers
    got = [uid for worker in dispatcher.workers for uid in ray.get(worker.uids.remote())]
    assert sorted(got) == list("abcd")
    dispatcher.generate_sequences(Prompts("ef"))
    assert all({"e", "f"} & {*ray.get(worker.uids.remote())} for worker in dispatcher.workers)


@pytest.mark.parametrize("ended", [pytest.param(True, marks=pytest.mark.full), False])
def test_workers_are_started_again_while_groups_end(ended: bool):
    dispatcher = Dispatcher(Manager(1), replace=2)
    dispatcher.generate_sequences(Prompts("a"))
    survived = []

    def three_deaths() -> None:
        for death in range(3):
            ray.kill(dispatcher.workers[0])
            until(lambda: dispatcher.recover("a"))
            survived.append(death)
            if ended:
                dispatcher.forget("b")

    if ended:
        three_deaths()
    else:
        with pytest.raises(PatchError, match="lost its last agent loop worker"):
            three_deaths()
    assert len(survived) == (3 if ended else 2)


def test_a_worker_that_cannot_be_started_again_ends_the_job_by_name():
    manager = Manager(1)
    manager.fails = True
    dispatcher = Dispatcher(manager, replace=3)
    dispatcher.generate_sequences(Prompts("a"))
    ray.kill(dispatcher.workers[0])
    with pytest.raises(PatchError, match="lost its last agent loop worker"):
        until(lambda: dispatcher.recover("a"))


def test_prompts_of_validation_are_dispatched_again_too():
    """verl waits for them in a loop of its own: the job hung."""
    gone = []
    dispatcher = Dispatcher(Manager(2), gone=gone.append, replace=0)
    dispatcher.generate_sequences(ForValidation("abcd"))
    first, second = dispatcher.workers
    lost, client = ray.get([first.uids.remote(), first.client.remote()])
    ray.kill(first)
    found = []
    until(lambda: found.append(dispatcher.recover("abcd", "val")) or any(found))
    assert sum(found) == len(lost) == 2 and gone == [client]
    assert sorted(ray.get(second.uids.remote())) == list("abcd")


def test_a_worker_that_cannot_be_reached_for_now_keeps_its_prompts():
    """It was taken for dead while it went on: its prompts were generated twice."""
    dispatcher = Dispatcher(Manager(1), replace=1)
    [worker] = dispatcher.workers
    silent = Unreached(worker, "__ray_ready__", "__ray_ready__")
    dispatcher.workers = [silent]
    dispatcher.generate_sequences(Prompts("ab"))

    def nothing_lost() -> bool:
        assert dispatcher.recover("ab") == 0
        return not silent.methods

    until(nothing_lost)
    for _ in range(5):
        assert nothing_lost()
        time.sleep(0.1)
    assert ray.get(worker.uids.remote()) == ["a", "b"] and dispatcher.workers == [silent]


def test_a_worker_that_may_have_got_its_prompts_or_not_is_ended_first(monkeypatch):
    kill = ray.kill
    monkeypatch.setattr(ray, "kill", lambda one: kill(getattr(one, "worker", one)))
    dispatcher = Dispatcher(Manager(2), replace=0)
    first, second = dispatcher.workers
    dispatcher._use([Unreached(first, "generate_sequences"), second])
    dispatcher.generate_sequences(Prompts("ab"))
    until(lambda: dispatcher.recover("ab"))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(first.uids.remote())
    assert sorted(ray.get(second.uids.remote())) == ["a", "b"]


def test_a_worker_that_is_stopped_holds_up_nobody():
    dispatcher = Dispatcher(Manager(2), replace=1)
    first, second = dispatcher.workers
    pid = ray.get(first.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        dispatcher.generate_sequences(Prompts("ab"))
        until(lambda: dispatcher.recover("ab") or ray.get(second.uids.remote()) == ["b"])
        assert dispatcher.recover("ab") == 0 and len(dispatcher.workers) == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: dispatcher.recover("ab") or ray.get(first.uids.remote()) == ["a"])


def test_a_job_that_ends_ends_its_workers():
    """What was dispatched ahead has lost its servers then: seven tracebacks at the end of a job that went well."""
    dispatcher = Dispatcher(Manager(2), replace=0)
    workers = list(dispatcher.workers)
    ray.get([one.uids.remote() for one in workers])
    dispatcher.end()
    for one in workers:
        with pytest.raises(ray.exceptions.RayActorError):
            while True:
                ray.get(one.uids.remote())
