"""Trainers that hold nothing between slices, on one rank and several: real processes, gloo."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from drafter_lab import capture, fill
from machine import limit
from transformers import AutoModelForCausalLM

from flashpatch.patches.eagle.train import coordinator
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights

LONG = 600.0  # seconds of a slice that is told to stop


def until(ranks: list[Coordinator], condition, seconds: float = 240.0) -> list[list[dict]]:
    end, events = time.monotonic() + limit(seconds), [[] for _ in ranks]
    while not condition():
        assert time.monotonic() < end, [(one.state, one.problem, list(one._errors)) for one in ranks]
        for one, found in zip(ranks, events, strict=True):
            found += one.poll()
        time.sleep(0.02)
    return events


@contextlib.contextmanager
def trainers(target: Path, folder: Path, ranks: int) -> Iterator[list[Coordinator]]:
    """Start a trainer for each rank, each with a queue of its own, as on nodes of their own."""
    model = AutoModelForCausalLM.from_pretrained(target)
    made = []
    for rank in range(ranks):
        fill(folder / f"queue{rank}", capture(model, 6, seed=rank))
        settings = {
            "target": str(target),
            "queue": str(folder / f"queue{rank}"),
            "folder": str(folder / "out"),
            "dtype": "float32",
            "rate": 5e-3,
            "batch": 128,
            "least": 2,
            "checkpoint": 5,
            "threads": 1,
            "release": True,
            "rank": rank,
            "ranks": ranks,
        }
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        made.append(
            Coordinator(
                settings, start_limit=240.0, stop_limit=120.0, silence_limit=120.0, environment=environment
            )
        )
    try:
        for one in made:
            assert one.start()
        until(made, lambda: all(one.state == "idle" for one in made))
        yield made
    finally:
        for one in made:
            one.close(limit(60))


def begin(members: list[Coordinator], steps: int | None = None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank, one in enumerate(members):
        group = {"address": "127.0.0.1", "port": port, "rank": rank, "ranks": len(members)}
        assert one.train(LONG, steps, group)
        assert one.on_device


def idle(members: list[Coordinator]):
    return lambda: all(one.state == "idle" for one in members)


def names(events: list[dict]) -> list[str]:
    return [event["event"] for event in events if event["event"] != "training"]


def weights(target: Path, drafter: Path) -> dict[str, torch.Tensor]:
    made = make_drafter(drafter_config(AutoModelForCausalLM.from_pretrained(target).config))
    load_weights(made, drafter)
    return made.state_dict()


@pytest.fixture
def warm_workers(monkeypatch, tmp_path):
    """Fork workers from an interpreter that has imported torch and transformers."""

    def popen(command, *, env, **_):
        return warm.popen(warm.MODELS, command[1:], env=env, cwd=tmp_path)

    monkeypatch.setattr(
        coordinator, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    )


@pytest.mark.slow
def test_ranks_train_together_survive_a_death_and_go_on_as_others(warm_workers, target, tmp_path):
    with trainers(target, tmp_path, 2) as ranks:
        first, second = ranks
        # Bounded in steps: both end by themselves, one drafter is written, after the device was given back.
        begin(ranks, steps=7)
        events = until(ranks, idle(ranks))
        assert names(events[0]) == ["released", "drafter", "idle"] and names(events[1]) == [
            "released",
            "idle",
        ]
        assert first.figures["step"] == second.figures["step"] == 7 and second.drafter is None
        assert first.figures["read"] == second.figures["read"] == 6
        begun = weights(target, first.drafter)
        assert all(torch.isfinite(weight).all() for weight in begun.values())
        # One of them is told to stop: both do, and nothing is left on the device.
        begin(ranks)
        until(ranks, lambda: min(one.figures["step"] for one in ranks) > 9)
        assert second.wait_released(limit(60)) and not second.on_device
        until(ranks, idle(ranks))
        told = first.figures["step"]
        assert told == second.figures["step"] > 9 and not first.on_device
        assert first.drafter.name == f"drafter-{told}"
        # One is killed in a slice: the other says so and is ready again.
        begin(ranks)
        until(ranks, lambda: first.figures["step"] > told + 11)
        os.kill(second.pid, signal.SIGKILL)
        until(ranks, lambda: first.state == "idle" and second.counts["died"] == 1)
        assert first.counts["errors"] == 1 and not first.on_device and first.counts["died"] == 0
        # A slice of one rank goes on from the checkpoint that was complete.
        begin([first], steps=1)
        until([first], idle([first]))
        assert told + 5 < first.figures["step"] and (first.figures["step"] - 1) % 5 == 0
        # The other comes back, with its samples and where the one before left off.
        until(ranks, lambda: second.train(LONG, group=None) or second.state == "starting")
        until(ranks, lambda: second.state == "training" and second.figures["read"] == 0)
        assert second.figures["samples"] == 6
        until(ranks, lambda: second.figures["step"] > first.figures["step"])
        second.stop()
        until(ranks, idle(ranks))
        # Rolled back: the next slice continues from the given weights.
        first.load(first.drafter)
        until([first], lambda: first.figures.get("command") == "load")
        begin([first], steps=1)
        until([first], idle([first]))
        assert first.counts["errors"] == 1 and sum(one.counts["killed"] for one in ranks) == 0


@pytest.mark.full
def test_a_rank_that_never_comes_costs_the_slice_alone(target, tmp_path):
    with trainers(target, tmp_path, 1) as (alone,):
        assert alone.train(LONG, group={"address": "127.0.0.1", "port": 1, "rank": 1, "ranks": 2})
        until([alone], lambda: alone.counts["errors"] == 1 and alone.state == "idle")
        begin([alone], steps=3)
        until([alone], idle([alone]))
        assert alone.figures["step"] == 3


@pytest.mark.full
def test_a_full_disk_costs_the_slice_alone(target, tmp_path):
    with trainers(target, tmp_path, 1) as (alone,):
        begin([alone], steps=3)
        until([alone], idle([alone]))
        kept = alone.drafter
        resource.prlimit(alone.pid, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        begin([alone], steps=3)
        until([alone], lambda: alone.counts["errors"] == 1 and alone.state == "idle")
        assert alone.drafter == kept and not alone.on_device and "OSError" in alone.problem
        assert alone.figures["checkpoints_failed"] == 2, "after step 5 and at the end"
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(alone.pid, resource.RLIMIT_FSIZE, unlimited)
        begin([alone], steps=3)
        until([alone], idle([alone]))
        assert alone.drafter != kept and alone.figures["step"] == 6, "on from the last checkpoint"
        assert json.loads((alone.drafter / "config.json").read_text())["hidden_size"] == 32
