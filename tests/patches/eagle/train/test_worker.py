"""The real worker, in a process of its own, between a queue and a coordinator."""

import json
import os
import queue
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_lab import capture, fill, make_target
from machine import limit, polled
from private_modes import loose
from transformers import AutoModelForCausalLM

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.worker import Worker


@pytest.mark.full
def test_training_survives_what_happens_to_a_trainer(target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    queue, folder = tmp_path / "queue", tmp_path / "out"
    fill(queue, capture(model, 10))
    damaged = sorted(queue.glob("*.safetensors"))[3]
    damaged.write_bytes(damaged.read_bytes()[:100])
    one = Coordinator(
        {"target": str(target), "queue": str(queue), "folder": str(folder), "dtype": "float32"}
        | {"rate": 5e-3, "batch": 128, "least": 4, "threads": 1},
        environment={"OMP_NUM_THREADS": "1"},
        start_limit=240.0,
        stop_limit=120.0,
    )
    try:
        # From scratch, with a corrupt file among the samples.
        one.train(300.0)
        polled(one, lambda: one.figures.get("step", 0) >= 12)
        assert one.figures["corrupt"] == 1 and one.figures["read"] == 9
        one.stop()
        polled(one, lambda: one.counts["drafters"] == 1 and one.state == "idle")
        written = one.figures["step"]
        one.train(300.0)
        polled(one, lambda: one.figures["step"] > written + 2)
        # Killed in the middle of a slice: noticed, started again, and goes on from the drafter that it wrote last.
        os.kill(one.pid, signal.SIGKILL)
        polled(one, lambda: one.counts["died"] == 1)
        fill(queue, capture(model, 10, seed=1))
        polled(one, lambda: one.train(300.0))
        events = polled(one, lambda: one.state == "training" and one.figures.get("event") == "training")
        ready = next(event for event in events if event["event"] == "ready")
        assert ready["device"] == "cpu" and ready["resumed"] and ready["step"] == written
        # A disk that takes nothing any more: the drafter is lost, the worker goes on.
        polled(one, lambda: one.figures["step"] > ready["step"] + 3)
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        one.stop()
        polled(one, lambda: one.counts["errors"] == 1 and one.state == "idle")
        assert "OSError" in one.problem and one.counts["drafters"] == 1
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        # Room again: the next slice gives a drafter that an engine can load.
        one.train(1.0)
        polled(one, lambda: one.counts["drafters"] == 2 and one.state == "idle")
        drafter = make_drafter(drafter_config(model.config))
        load_weights(drafter, one.drafter)
        assert json.loads((one.drafter / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert all(torch.isfinite(weight).all() for weight in drafter.parameters())
        # A moved policy is read in.
        one.order(target=str(target))
        one.train(1.0) or polled(one, lambda: one.train(1.0))
        polled(one, lambda: one.counts["drafters"] == 3 and one.state == "idle")
        assert one.counts["errors"] == 1
        pid = one.pid
    finally:
        one.close(limit(60))
    assert one.counts["killed"] == 0
    assert loose(folder) == [] and len(list(folder.rglob("*"))) > 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_newest_drafters_stay_on_disk(target, tmp_path):
    settings = WorkerSettings(str(target), str(tmp_path / "queue"), str(tmp_path / "out"))
    for other in ("drafter-1-good", ".drafter-3-77"):  # a user's copy, and what a killed trainer left
        (tmp_path / "out" / other).mkdir(parents=True)
    events: list[dict] = []
    worker = Worker(settings, events.append, queue.Queue())
    for worker.trainer.count in range(1, 8):
        worker._write({})
    left = sorted(path.name for path in (tmp_path / "out").glob("*drafter-*"))
    assert left == ["drafter-1-good", "drafter-5", "drafter-6", "drafter-7"]
    worker.trainer.count = 1  # a trainer from scratch, where one trained for longer before
    worker._write({})
    assert Path(events[-1]["folder"]).exists()


def test_a_trainer_goes_on_from_the_newest_drafter_and_refuses_another_targets(target, tmp_path):
    settings = WorkerSettings(str(target), str(tmp_path / "queue"), str(tmp_path / "out"), dtype="float32")
    make_target(hidden_size=64).save_pretrained(tmp_path / "wide")

    def start(**other) -> Worker:
        return Worker(replace(settings, **other), lambda event: None, queue.Queue())

    first = start()
    for first.trainer.count in (9, 10):
        for weight in first.trainer.drafter.parameters():
            weight.data += 1
        first._write({})
    second = start(seed=7)
    assert second.resumed and second.trainer.count == 10
    written = first.trainer.weights()
    assert all(torch.equal(weight, written[name]) for name, weight in second.trainer.weights().items())
    with pytest.raises(PatchError, match="drafter-10"):
        start(target=str(tmp_path / "wide"))
    third = start(drafter=str(tmp_path / "out" / "drafter-9"))  # as the engine was opened with
    for third.trainer.count in range(11, 15):
        third._write({})
    left = {one.name for one in (tmp_path / "out").iterdir()}
    assert left == {f"drafter-{count}" for count in (9, 12, 13, 14)}


@pytest.mark.parametrize(("is_there", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_drafter_is_trained_where_an_accelerator_is(is_there, device, tmp_path, monkeypatch):
    worker = object.__new__(Worker)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    settings = WorkerSettings(str(tmp_path / "no model"), str(tmp_path / "queue"), str(tmp_path))
    with pytest.raises((OSError, ValueError)):  # which is looked for after the device is chosen
        Worker.__init__(worker, settings, print, queue.Queue())
    assert worker.device == torch.device(device)
