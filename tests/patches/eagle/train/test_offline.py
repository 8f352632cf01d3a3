"""Training without a job beside it, with a worker that does as it is told, dies, or never starts."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train import coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.vllm import warmup


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train with the fake worker; returns what `train_for` does, and the coordinator."""
    monkeypatch.setattr(coordinator, "MODULE", "fake_trainer")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(coordinator.Coordinator.close, "__defaults__", (limit(60),))
    made = []

    class Noted(warmup.Coordinator):
        def __init__(self, *args, **more) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr(warmup, "Coordinator", Noted)

    def run(faults: str, seconds: float, meanwhile=lambda one: None):
        monkeypatch.setenv("FAKE", faults)
        threading.Thread(target=lambda: meanwhile(_first(made)), daemon=True).start()
        settings = WorkerSettings(target="t", queue="r", folder=str(tmp_path / "out"))
        return warmup.train_for(settings, seconds, lambda event: None), made[0]

    return run


def _first(made: list) -> coordinator.Coordinator:
    while not made:
        time.sleep(0.01)
    return made[0]


def test_a_drafter_is_returned_when_the_time_is_over(train):
    (folder, figures), one = train("", 0.5)
    assert folder == Path("/some/drafter-1") and figures["step"] == 1
    assert one.state == "down" and one.counts["started"] == 1 and one.counts["died"] == 0 and not one.problem


def test_a_slice_that_begins_and_ends_between_two_looks_is_seen(train, monkeypatch):
    begin = coordinator.Coordinator._begin

    def begin_slowly(self, seconds):
        begun = begin(self, seconds)
        time.sleep(1.0)  # all that the worker reports is there before the state is looked at again
        return begun

    monkeypatch.setattr(coordinator.Coordinator, "_begin", begin_slowly)
    (folder, _), one = train("", 0.5)
    assert folder == Path("/some/drafter-1") and one.counts["drafters"] == 1


def test_a_worker_that_dies_is_started_again(train, monkeypatch):
    def kill(one) -> None:
        while one.state != "training":
            time.sleep(0.01)
        monkeypatch.setenv("FAKE", "")  # of the next
        os.kill(one.pid, signal.SIGKILL)

    (folder, _), one = train("hang", 60.0, kill)
    assert folder == Path("/some/drafter-1")
    assert one.counts["started"] == 2 and "exit -9" in one.problem


def test_a_worker_that_never_starts_is_an_error_with_its_reason(train, monkeypatch):
    monkeypatch.setattr(coordinator, "MODULE", "no_such_trainer")
    with pytest.raises(PatchError) as raised:
        train("", 1.0)
    assert "no drafter was trained" in str(raised.value) and "no_such_trainer" in str(raised.value)
