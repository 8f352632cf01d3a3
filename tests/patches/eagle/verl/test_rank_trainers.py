"""Trainers on ranks: each rank a process of its own as in a verl worker, called through a queue instead of Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import limit
from tree import SUPPORT

from flashpatch.patches.eagle.train import coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl import rank_trainers
from flashpatch.patches.eagle.verl.rank_trainers import RankTrainers, on_rank


class Ranks:
    """Call `on_rank` as the ranks of a job would: each has a module of its own, so a coordinator of its own."""

    def __init__(self, monkeypatch, faults):
        self.monkeypatch, self.faults, self.coordinators, self.calls = monkeypatch, faults, {}, []

    def __call__(self, ranks, method, arguments):
        found = []
        for rank, given in zip(ranks, arguments, strict=True):
            self.calls.append((rank, method, given))
            self.monkeypatch.setenv("FAKE", self.faults.get(rank, ""))
            self.monkeypatch.setattr(rank_trainers, "_coordinator", self.coordinators.get(rank))
            found.append(on_rank(None, method, *given))
            self.coordinators[rank] = rank_trainers._coordinator
        return found

    def made(self, method):
        return [(rank, *given) for rank, called, given in self.calls if called == method]


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "MODULE", "fake_trainer")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(rank_trainers, "_meeting", lambda: ("10.0.0.1", 1234))
    made = []

    def start(number=3, **faults):
        ranks = Ranks(monkeypatch, {int(rank.removeprefix("r")): fault for rank, fault in faults.items()})
        settings = WorkerSettings("t", "r", str(tmp_path / "out"), device="cuda:7", samples=10, bytes=900)
        made.append(RankTrainers(settings, ranks, number))
        made[-1].start()
        return made[-1], ranks

    yield start
    for one in made:
        for found in one._call.coordinators.values():
            found.close(0.1)


def until(condition, seconds=60.0):
    end = time.monotonic() + limit(seconds)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ready(one, ranks, number):
    """Wait until so many ranks are idle."""
    until(
        lambda: (
            sum(report["state"] == "idle" for report in ranks(range(one.ranks), "poll", [()] * one.ranks))
            == number
        )
    )


def test_each_rank_has_a_process_that_knows_its_share(make):
    one, ranks = make(3)
    settings = [WorkerSettings.parse(given) for _, given in ranks.made("open")]
    assert [made.rank for made in settings] == [0, 1, 2]
    for made in settings:
        assert (made.ranks, made.release, made.device, made.samples, made.bytes) == (3, True, "cuda", 3, 300)
    ready(one, ranks, 3)
    assert len({found.pid for found in ranks.coordinators.values()}) == 3


def test_a_slice_takes_the_ranks_that_are_ready(make):
    one, ranks = make(3, r1="mute")
    ready(one, ranks, 2)
    assert one.train(60.0, [1, 2], 9) and one.training == (2,)
    until(lambda: not one.is_training())
    assert one.train(60.0) and one.training == (0, 2)
    place = {"address": "10.0.0.1", "port": 1234}
    assert ranks.made("train") == [
        (2, 60.0, 9, {**place, "rank": 0, "ranks": 1}),
        (0, 60.0, None, {**place, "rank": 0, "ranks": 2}),
        (2, 60.0, None, {**place, "rank": 1, "ranks": 2}),
    ]
    assert not one.train(60.0), "one slice at a time"
    assert one.stop(limit(60)) and one.training == ()
    assert one.wait_idle(limit(60)) is True
    assert one.drafter == Path("/some/drafter-1") and one.state == "idle" and one.figures["step"] == 1


def test_a_drafter_is_reported_once(make):
    one, ranks = make(1)
    ready(one, ranks, 1)
    one.train(60.0)
    until(lambda: one.drafter is not None or one.is_training() or one.wait_idle(limit(60)))
    one.wait_idle(limit(60))
    assert one.drafter == Path("/some/drafter-1")
    one.drafter = None  # rolled back
    one.wait_idle(limit(60))
    assert one.drafter is None


def test_a_rank_that_does_not_give_its_device_back_is_killed_and_comes_back(make):
    one, ranks = make(2, r1="hang")
    ready(one, ranks, 2)
    assert one.train(60.0) and one.is_training()
    assert one.stop(0.2) is False
    assert "rank 1" in one.problem and ranks.coordinators[1].counts["killed"] == 1
    ranks.faults.clear()
    until(lambda: one.train(60.0, [1]))
    assert ranks.coordinators[1].counts["started"] == 2


def test_a_death_in_a_slice_ends_it_on_that_rank_alone(make):
    one, ranks = make(2, r0="hang", r1="hang")
    ready(one, ranks, 2)
    assert one.train(60.0)
    os.kill(ranks.coordinators[1].pid, signal.SIGKILL)
    until(lambda: one.is_training() and "rank 1: the trainer died" in one.problem)
    assert ranks.coordinators[0].state == "training"
    assert one.stop(0.2) is False and one.training == ()


def test_all_ranks_follow_the_policy_and_one_writes_what_was_rolled_back(make):
    one, ranks = make(2)
    ready(one, ranks, 2)
    assert one.target("/embeddings") and one.load("/some/drafter-7")
    assert ranks.made("target") == [(0, "/embeddings"), (1, "/embeddings")]
    assert ranks.made("load") == [(0, "/some/drafter-7")]


def test_closing_never_raises(make):
    one, ranks = make(1)

    def gone(*arguments):
        raise RuntimeError("the actor died")

    kept, one._call = one._call, gone
    one.close()
    one._call = kept
    one.close()
    assert ranks.coordinators[0].state == "down"


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [("", True, "cuda:3"), ("cuda", True, "cuda:3"), ("cpu", True, "cpu"), ("", False, "")],
)
def test_a_rank_trains_on_the_device_of_its_worker(monkeypatch, asked, there, found):
    cuda = SimpleNamespace(is_available=lambda: there, current_device=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert rank_trainers._own_device(asked) == found


def test_a_rank_without_a_trainer_says_so(monkeypatch):
    monkeypatch.setattr(rank_trainers, "_coordinator", None)
    with pytest.raises(RuntimeError, match="no drafter trainer"):
        on_rank(None, "poll")


def test_the_meeting_is_on_a_free_port():
    pytest.importorskip("ray")
    address, port = rank_trainers._meeting()
    with socket.socket() as one:
        one.bind(("", port))
    assert address.count(".") == 3
