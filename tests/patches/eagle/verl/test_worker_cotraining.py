"""A job whose trainers are on verl's workers, with stand-ins for the workers; the real ones are in test_job.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl import worker_cotraining
from flashpatch.patches.eagle.verl.worker_cotraining import WorkerJob, ranks_by_server


def worker(number):
    return SimpleNamespace(_actor_id=number)


def manager(replicas=2, each=2, others=0):
    """Stand for verl's manager, with ``others`` workers of the last replica that are not the trainer's."""
    workers = [worker(number) for number in range(replicas * each)]
    found = [
        SimpleNamespace(_server_address=f"10.0.0.{place}", workers=workers[place * each : (place + 1) * each])
        for place in range(replicas)
    ]
    found[-1].workers = found[-1].workers + [worker(100 + number) for number in range(others)]
    return SimpleNamespace(actor_wg=SimpleNamespace(workers=workers, world_size=len(workers)), replicas=found)


class Trainers:
    """Stand for `RankTrainers`: each slice lasts for some looks."""

    def __init__(self, settings=None, call=None, ranks=0):
        self.ranks, self.slices, self.stops, self.looks, self.refuses = ranks, [], 0, 0, 0

    def train(self, seconds, ranks=None, steps=None):
        if self.refuses:
            self.refuses -= 1
            return False
        self.slices.append((seconds, ranks, steps))
        self.looks = 3
        return True

    def is_training(self):
        self.looks -= 1
        return self.looks > 0

    def stop(self, limit):
        self.stops += 1
        return True

    def close(self):
        self.closed = True


class Tail:
    """Stand for `tail.Tail`."""

    def __init__(self, *arguments):
        self.seconds, self.begun, self.ends = 0.0, [], 0

    def begin(self, seconds, steps):
        self.begun.append((seconds, steps))

    def end(self):
        self.ends += 1


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_cotraining, "RankTrainers", Trainers)
    monkeypatch.setattr(worker_cotraining, "Tail", Tail)
    monkeypatch.setattr(worker_cotraining, "_POLL_SECONDS", 0.001)

    def job(of=None, balancer="balancer", rest=5.0, **more):
        given = {"settings": {"target": "t", "folder": str(tmp_path)}, "slice": 60.0, "timeout": 1.0, **more}
        one = WorkerJob(of or manager(), balancer, rest, **given)
        one.coordinator = one._make_trainer(WorkerSettings("t", "r", str(tmp_path)))
        return one

    return job


def test_ranks_go_by_the_server_of_their_replica():
    assert ranks_by_server(manager(3, 2)) == {"10.0.0.0": [0, 1], "10.0.0.1": [2, 3], "10.0.0.2": [4, 5]}


def test_replicas_on_other_devices_are_refused_by_name():
    with pytest.raises(PatchError, match="share devices.*Leave on=workers out"):
        ranks_by_server(manager(2, 1, others=1))


def test_the_tail_is_watched_from_the_update_to_the_end_of_the_rollouts(make):
    one = make(steps=7)
    one.rollouts_begin()
    one.rollouts_end()
    assert one._tail.begun == [(60.0, 7)] and one._tail.ends == 1
    one.close()
    assert one._tail.ends == 2 and one.coordinator.closed


def test_all_ranks_train_in_the_pause_for_what_the_tail_did_not_give(make):
    one = make(steps=7)
    one._tail.seconds = 2.0
    one.rollouts_ended()
    assert one.coordinator.slices == [(3.0, None, 7)] and one.coordinator.stops == 1
    one._tail.seconds = 6.0
    one.rollouts_ended()
    assert len(one.coordinator.slices) == 1


def test_the_pause_waits_for_trainers_that_still_write(make):
    one = make()
    one.coordinator.refuses = 3
    one.rollouts_ended()
    assert len(one.coordinator.slices) == 1


def test_some_steps_only(make):
    one = make(every=2)
    one._updates = 1
    one.rollouts_begin()
    one.rollouts_ended()
    assert not one._tail.begun and not one.coordinator.slices
    one._updates = 2
    one.rollouts_begin()
    one.rollouts_ended()
    assert one._tail.begun and one.coordinator.slices


def test_without_rest_no_step_waits(make):
    one = make(rest=0.0)
    one.rollouts_ended()
    assert not one.coordinator.slices


def test_one_replica_has_no_tail(make):
    one = make(manager(1, 4))
    assert one._tail is None and one.coordinator.ranks == 4
    one.rollouts_begin()
    one.rollouts_end()
    one.rollouts_ended()
    assert one.coordinator.slices


def test_without_a_balancer_the_log_says_what_is_missing(make, caplog):
    assert make(balancer=None)._tail is None
    assert "no request balancer" in caplog.text


def test_a_fault_in_the_pause_is_said_and_stops_nothing(make, monkeypatch, caplog):
    one = make()

    def fail(*arguments, **more):
        raise RuntimeError("the actor died")

    monkeypatch.setattr(one.coordinator, "train", fail)
    one.rollouts_ended()
    assert "the actor died" in caplog.text
