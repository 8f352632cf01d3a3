"""The coordinator against a worker that misbehaves in every way; the real worker is in test_worker.py."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from machine import limit, polled
from tree import SUPPORT

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train import coordinator
from flashpatch.patches.eagle.train.coordinator import Coordinator

HANGS = 600.0  # seconds that the fake worker sleeps: a call that waits for it takes as long


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a coordinator of the fake worker; ended after the test."""
    monkeypatch.setattr(coordinator, "MODULE", "fake_trainer")
    made = []

    def make(faults="", **limits):
        settings = {"target": "t", "queue": "r", "folder": str(tmp_path / "out")}
        environment = {"PYTHONPATH": str(SUPPORT), "FAKE": faults}
        made.append(Coordinator(settings, environment=environment, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close(0.1)


def test_a_slice_gives_a_drafter_and_the_worker_exits_on_command(run):
    one = run()
    assert one.train(5.0)  # started on the way
    polled(one, lambda: one.counts["drafters"] == 1 and one.state == "idle")
    assert one.drafter == Path("/some/drafter-1")
    assert one.figures["step"] == 1
    pid = one.pid
    one.close(limit(60))
    assert one.state == "down" and one.counts["killed"] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    one.start()
    polled(one, lambda: one.state == "idle")
    assert one.figures["event"] == "ready" and one.figures["step"] == 0, "of the worker before"


def test_the_log_says_where_a_drafter_is_trained_if_no_device_is_named(run, caplog):
    one = run()
    one._handle({"event": "ready", "device": "cpu"})
    assert "trained on cpu" in caplog.text
    caplog.clear()
    one.settings = replace(one.settings, device="cuda")
    one._handle({"event": "ready", "device": "cuda"})
    assert not caplog.text


def test_a_killed_worker_is_noticed_and_started_again(run):
    one = run("hang")
    one.train(60.0)
    polled(one, lambda: one.state == "training")
    os.kill(one.pid, signal.SIGKILL)
    polled(one, lambda: one.state == "down")
    assert one.counts["died"] == 1 and "exit -9" in one.problem
    assert one.train(60.0) in (True, False)
    polled(one, lambda: one.train(60.0) or one.state == "training")
    polled(one, lambda: one.state == "training")
    assert one.counts["started"] == 2


def test_orders_reach_a_worker_that_starts_and_one_that_starts_again(run):
    one, got = run(), []
    one._handle = lambda event, handle=one._handle: (got.append(event), handle(event))
    for step in range(3):
        one.order(target=f"/shared-{step}")
    for _ in range(2):
        got.clear()
        one.train(1.0)
        polled(one, lambda: one.train(1.0) or one.state == "training")
        polled(one, lambda: one.state == "idle" and one.counts["drafters"])
        commands = [event for event in got if event["event"] == "got"]
        assert {event["target"] for event in commands} == {"/shared-2"}
        os.kill(one.pid, signal.SIGKILL)
        polled(one, lambda: one.state == "down")


def test_an_idle_worker_gets_orders_at_once(run):
    one = run()
    one.start()
    polled(one, lambda: one.state == "idle")
    one.order(target="/a")
    events = []
    while not events:
        events = [event for event in one.poll() if event["event"] == "got"]
    assert events[0]["command"] == "order" and events[0]["target"] == "/a" and one.state == "idle"


def test_a_worker_that_keeps_dying_is_given_up(run):
    one = run("crash", restarts=1)
    one.train(1.0)
    polled(one, lambda: one.train(1.0) is False and one.state == "given up")
    assert one.counts["died"] == 2 and "the reason" in one.problem
    assert one.train(1.0) is False and one.stop() is False


def test_refused_settings_are_heard_after_the_workers_end_and_not_tried_again(run, monkeypatch):
    read = coordinator._read
    monkeypatch.setattr(coordinator, "_read", lambda *args: time.sleep(0.3) or read(*args))
    one = run("refuse")
    one.start()
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    assert [event["event"] for event in one.poll()] == ["refused"]
    assert one.state == "given up" and "no target at /nowhere" in one.problem
    assert one.train(1.0) is False and one.counts["started"] == 1, "it would be refused again"


@pytest.mark.parametrize(
    ("faults", "limits", "says"),
    [
        ("mute", {"start_limit": 0.5}, "starting for more than"),
        ("hang", {"stop_limit": 0.5}, "training for more than"),
    ],
)
def test_a_worker_over_its_time_limit_is_killed(run, faults, limits, says):
    one = run(faults, **limits)
    one.train(0.1 if "stop_limit" in limits else 60.0)
    polled(one, lambda: one.counts["killed"] == 1)
    assert says in one.problem and one.pid is None and one.state == "down"


def test_waiting_for_idleness_ends_in_time(run):
    one = run("hang")
    one.train(60.0)
    polled(one, lambda: one.state == "training")
    began = time.monotonic()
    assert one.wait_idle(0.3) is False
    assert time.monotonic() - began < HANGS
    assert one.counts["killed"] == 1
    assert one.wait_idle(0.3) is True


def test_a_worker_that_does_not_read_is_waited_for_by_no_command_and_closed_in_time(run):
    one = run("deaf")
    one.start()
    polled(one, lambda: one.state == "idle")
    began = time.monotonic()
    for _ in range(3000):  # more than a pipe holds
        one.order(target="/some/drafter-with-a-long-name")
    assert one.counts["undelivered"] > 1
    one.close(0.3)
    assert time.monotonic() - began < HANGS and one.counts["killed"] == 1


def test_an_error_of_the_worker_is_reported_and_it_goes_on(run):
    one = run("error")
    one.train(1.0)
    polled(one, lambda: one.counts["errors"] == 1 and one.state == "idle")
    assert "No space left" in one.problem and one.drafter is None
    assert one.train(1.0) is True


def test_a_folder_that_cannot_be_made_is_a_problem_and_no_exception(run, tmp_path):
    (tmp_path / "out").write_text("in the way")
    one = run(restarts=0)
    assert one.start() is False
    assert one.state == "given up" and "cannot be started" in one.problem


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(PatchError, match="speed unknown, folder missing.*window"):
        Coordinator({"target": "t", "queue": "r", "speed": 3})
