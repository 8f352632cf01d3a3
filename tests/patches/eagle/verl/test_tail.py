"""The tail of a step, with counts that a test sets and trainers that note what they are told."""

from __future__ import annotations

import time

import pytest
from machine import limit

from flashpatch.patches.eagle.verl import tail
from flashpatch.patches.eagle.verl.tail import Tail

RANKS = {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]}


class Trainers:
    """Stand for `RankTrainers`."""

    def __init__(self):
        self.training, self.slices, self.stops, self.ended = (), [], 0, False
        self.given_up = set()  # ranks whose processes are

    def train(self, seconds, ranks, steps):
        self.slices.append((list(ranks), steps))
        self.training, self.ended = tuple(set(ranks) - self.given_up), False
        return bool(self.training)

    def stop(self, limit):
        self.training, self.stops = (), self.stops + 1
        return True

    def is_training(self):
        return not self.ended


class Counts(dict):
    """Requests in flight by server, and how often they were asked for."""

    polls = 0

    def __call__(self):
        self.polls += 1
        if "fail" in self:
            raise RuntimeError("the balancer is gone")
        return self


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(tail, "POLL_SECONDS", 0.005)
    return Counts(a=3, b=3, c=3, d=3)


@pytest.fixture
def watched(counts):
    made = Tail(Trainers(), RANKS, counts, 1.0)
    yield made
    made.end()


def until(condition):
    end = time.monotonic() + limit(30)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def drain(watched, counts, name, steps=None, seconds=60.0):
    """Begin to watch, and wait until a replica that has drained trains."""
    watched.begin(seconds, steps)
    counts.update({name: 3})
    polls(counts)
    counts.update({name: 0})
    until(lambda: watched.trainers.training)


def polls(counts, number=6):
    """Wait until the counts were looked at some times more."""
    seen = counts.polls
    until(lambda: counts.polls >= seen + number)


def test_drained_replicas_train_until_the_rollouts_end(watched, counts):
    watched.begin(60.0, 9)
    polls(counts)
    assert not watched.trainers.slices
    counts.update(b=0)
    until(lambda: watched.trainers.training)
    assert watched.trainers.slices == [([2, 3], 9)]
    watched.end()
    assert watched.trainers.stops == 1 and watched.slices == 1 and 0 < watched.seconds < limit(30)
    seen = counts.polls
    time.sleep(0.05)
    assert counts.polls == seen, "nobody watches any more"


def test_a_server_that_has_had_no_request_yet_is_not_drained(watched, counts):
    counts.update(b=0, c=0, d=0)
    watched.begin(60.0)
    polls(counts)
    assert not watched.trainers.slices


def test_nobody_trains_when_all_have_drained(watched, counts):
    """A conversation may be with its tools; between steps the job itself says when to train."""
    watched.begin(60.0)
    polls(counts)
    counts.update(a=0, b=0, c=0, d=0)
    polls(counts)
    assert not watched.trainers.slices


def test_a_request_ends_the_slice_and_the_replica_may_drain_again(watched, counts):
    drain(watched, counts, "b")
    counts.update(b=1)
    until(lambda: watched.trainers.stops == 1)
    assert watched.interrupted == 1
    polls(counts)
    assert len(watched.trainers.slices) == 1
    counts.update(b=0)
    until(lambda: len(watched.trainers.slices) == 2)


def test_a_replica_that_dies_while_its_ranks_train_takes_nothing_with_it(watched, counts):
    drain(watched, counts, "b")
    del counts["b"]  # as the balancer forgets it
    polls(counts)
    counts.update(c=0)
    until(lambda: len(watched.trainers.slices) == 2)
    watched.end()
    assert watched.trainers.training == () and watched.problem == "" and watched.interrupted == 0


def test_a_slice_grows_when_twice_as_many_have_drained(watched, counts):
    drain(watched, counts, "b")
    counts.update(d=0)
    until(lambda: len(watched.trainers.slices) == 2)
    assert watched.trainers.slices[1][0] == [2, 3, 6, 7]
    counts.update(a=0)
    polls(counts)
    assert len(watched.trainers.slices) == 2 and watched.interrupted == 0


@pytest.mark.parametrize("steps", [5, None])
def test_no_slice_follows_one_that_ended_by_itself(watched, counts, steps):
    """It made all its steps, or failed, as where memory is short: the next would fail too."""
    drain(watched, counts, "b", steps)
    watched.trainers.ended = True
    until(lambda: watched.trainers.stops == 1)
    polls(counts)
    assert len(watched.trainers.slices) == 1
    drain(watched, counts, "b", steps)
    assert len(watched.trainers.slices) == 2


def test_ranks_that_are_given_up_do_not_interrupt_the_others_again_and_again(watched, counts):
    watched.trainers.given_up = {3}
    drain(watched, counts, "b")
    polls(counts, 20)
    assert watched.trainers.training == (2,) and watched.trainers.stops == 0


def test_training_ends_with_its_time(watched, counts):
    drain(watched, counts, "b", seconds=0.05)
    time.sleep(0.06)
    watched.trainers.ended = True
    until(lambda: watched.trainers.stops == 1)
    polls(counts)
    assert len(watched.trainers.slices) == 1 and watched.seconds > 0.05


@pytest.mark.parametrize("where", ["balancer", "train", "stop"])
def test_a_fault_ends_training_and_nothing_else(watched, counts, where, caplog, monkeypatch):
    watched.begin(60.0)
    polls(counts)

    def fail(*arguments):
        raise RuntimeError("rank 3 is gone")

    if where != "balancer":
        monkeypatch.setattr(watched.trainers, where, fail)
    counts.update(b=0)
    until(lambda: watched.trainers.training or watched.problem)
    if where == "balancer":
        counts.update(fail=1)
        until(lambda: watched.trainers.stops == 1)
    watched.end()
    assert "gone" in watched.problem and "gone" in caplog.text
    assert watched.trainers.stops == (where != "stop"), "ranks that were told to train are told to stop"
    counts.pop("fail", None)
    monkeypatch.undo()
    watched.begin(60.0)
    counts.update(b=1)
    watched.end()
    assert watched.problem == ""
